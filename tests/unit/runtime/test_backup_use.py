"""A backup counts as reused when its pages are first loaded back, and not again until the next."""

import numpy as np
import pytest

from kvtiers.events import Copy
from kvtiers.runtime.backup_use import BackupUse
from kvtiers.types import Purpose


def slots(*numbers):
    return np.array(numbers, np.int32)


def backup(*host):
    return Copy(1, Purpose.BACKUP, 0, len(host), slots(*range(len(host))), slots(*host))


def load(*host):
    return Copy(2, Purpose.LOAD_BACK, 0, len(host), slots(*host), slots(*range(len(host))))


def prefetch(*host):
    return Copy(3, Purpose.PREFETCH, 0, len(host), None, slots(*host))


def store(*host):
    return Copy(4, Purpose.STORE, 0, len(host), slots(*host), None)


@pytest.fixture
def use():
    return BackupUse(8)


def test_pages_are_counted_once_per_backup(use):
    assert use.ended(backup(5, 3, 4), 3) == 0
    assert use.ended(load(3, 4), 2) == 2
    assert use.ended(load(5, 3, 4), 3) == 1
    assert use.ended(load(5, 3, 4), 3) == 0
    use.ended(backup(3), 1)
    assert use.ended(load(5, 3, 4), 3) == 1


def test_only_pages_that_arrived_count(use):
    use.ended(backup(5, 3, 4), 2)
    assert use.ended(load(5, 3, 4), 1) == 1
    assert use.ended(load(5, 3, 4), 0) == 0
    assert use.ended(load(5, 3, 4), 3) == 1


def test_what_came_from_storage_is_no_backup(use):
    use.ended(backup(1, 2), 2)
    use.ended(prefetch(2, 3), 2)  # slot 2 was given up meanwhile and holds another page now
    assert use.ended(load(1, 2, 3), 3) == 1


def test_storing_a_page_is_no_use_of_it_on_host(use):
    use.ended(backup(1, 2), 2)
    assert use.ended(store(1, 2), 2) == 0
    assert use.ended(load(1, 2), 2) == 2
