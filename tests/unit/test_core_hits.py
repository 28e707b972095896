"""How a used prefix splits by tier: the table, and what holds for all inputs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.core.hits import split_cached_prefix_by_tier


@pytest.mark.parametrize(
    ("prefix", "host", "storage", "start", "host_is_storage", "expected"),
    [
        (100, 70, 20, None, False, (30, 50, 20)),
        (80, 50, 20, 80, False, (30, 50, 0)),
        (90, 60, 20, 80, False, (30, 50, 10)),
        (100, 70, 70, None, True, (30, 0, 70)),
        (100, 0, 20, 80, False, (80, 0, 20)),
        (100, 0, 20, 80, True, (80, 0, 20)),
        (100, 60, 40, None, False, (40, 20, 40)),
        (50, 30, 100, None, False, (20, 0, 30)),
        (25, 0, 0, None, False, (25, 0, 0)),
        (40, 40, 15, None, False, (0, 25, 15)),
        (10, 25, 5, None, False, (0, 5, 5)),
        (0, 7, 9, None, False, (0, 0, 0)),
        (0, 7, 9, 3, True, (0, 0, 0)),
    ],
)
def test_the_table_of_splits(
    prefix: int,
    host: int,
    storage: int,
    start: int | None,
    host_is_storage: bool,
    expected: tuple[int, int, int],
) -> None:
    split = split_cached_prefix_by_tier(
        prefix, host, storage, start, host_is_storage=host_is_storage
    )
    assert split == expected


@given(
    prefix=st.integers(0, 300),
    host=st.integers(-5, 300),
    storage=st.integers(-5, 300),
    start=st.none() | st.integers(0, 300),
)
def test_the_parts_are_never_negative_and_sum_to_the_prefix(
    prefix: int, host: int, storage: int, start: int | None
) -> None:
    split = split_cached_prefix_by_tier(prefix, host, storage, start)
    assert sum(split) == prefix
    assert min(split) >= 0
    assert split.storage <= max(0, storage)
