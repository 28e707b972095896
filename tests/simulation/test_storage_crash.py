"""SIGKILL at random points of a write load: what is found afterwards is whole, right and complete.

Each seed is one directory that lives through several kills. A failure names the seed in the test's
name; `pytest "tests/simulation/test_storage_crash.py::...[seed]"` replays the load (the moment of
the kill is real time and differs).
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from storage_crash_paths import PAGE_BYTES, PATHS, refs_of

from kvtiers.storage import FileStore
from kvtiers.storage.file import maintenance
from kvtiers.storage.file.directory import DIRECTORY_OVERHEAD_BYTES
from kvtiers.storage.file.format import Geometry
from kvtiers.storage.file.space import segment_cost_bytes
from kvtiers.testing.storage_contract import payload, read

KILLS_PER_SEED = 4
SMALL_QUOTA = DIRECTORY_OVERHEAD_BYTES + 4 * segment_cost_bytes(Geometry(PAGE_BYTES, 25))


def run_and_kill(directory, quota_bytes, seed, rng):
    """Run the child, kill it at a random moment, and return the pages it acknowledged."""
    here = Path(__file__).parent
    child = subprocess.Popen(
        [sys.executable, here / "storage_crash_child.py", directory, str(quota_bytes), str(seed)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(here)},
    )
    lines = []
    if rng.random() < 0.8:  # else kill it while it starts
        lines.append(child.stdout.readline())
    time.sleep(rng.random() * 0.1)
    child.send_signal(signal.SIGKILL)
    rest, _ = child.communicate()
    assert child.returncode == -signal.SIGKILL
    whole_lines = (b"".join(lines) + rest).decode().rpartition("\n")[0].splitlines()
    return {(int(path), int(page)) for path, page in map(str.split, whole_lines)}


def bytes_on_disk(directory):
    files = [directory, *directory.iterdir()] if directory.exists() else []
    return sum(max(file.stat().st_blocks * 512, file.stat().st_size) for file in files)


def check_after_crash(directory, quota_bytes):
    """Returns the pages held; everything about them has been verified."""
    if quota_bytes:
        assert bytes_on_disk(directory) <= quota_bytes
    with FileStore(directory, PAGE_BYTES, quota_bytes) as store:
        if quota_bytes:
            assert bytes_on_disk(directory) <= quota_bytes
        held = set()
        keys = set()
        for path in range(PATHS):
            refs = refs_of(path)
            found = [ref for ref in refs if store.exists_prefix([ref])]
            assert read(store, found, PAGE_BYTES) == [payload(ref, PAGE_BYTES) for ref in found]
            assert found == refs[: len(found)], "a page is held without its parent"
            held |= {(path, ref.depth) for ref in found}
            keys |= {ref.key for ref in found}
        stats = store.stats()
        assert stats.integrity_failures == 0, "a torn page was found"
        assert stats.pages == len(keys), "a page nobody wrote is held"
    report = maintenance.check(directory)
    assert not report.damages
    assert report.unreachable_pages == 0
    return held


def live_through_kills(directory, quota_bytes, seed):
    rng = random.Random(seed)
    acknowledged = set()
    for kill in range(KILLS_PER_SEED):
        acknowledged |= run_and_kill(directory, quota_bytes, seed * 100 + kill, rng)
        if not directory.exists():  # killed before it got so far
            continue
        held = check_after_crash(directory, quota_bytes)
        if not quota_bytes:
            assert acknowledged <= held, "an acknowledged page is lost"


@pytest.mark.parametrize("seed", range(3))
def test_everything_acknowledged_is_found_after_sigkill(tmp_path, seed):
    live_through_kills(tmp_path / "store", 0, seed)


@pytest.mark.parametrize("seed", range(2))
def test_quota_and_order_hold_when_sigkill_meets_eviction(tmp_path, seed):
    live_through_kills(tmp_path / "store", SMALL_QUOTA, seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 163))
def test_soak_everything_acknowledged_is_found_after_sigkill(tmp_path, seed):
    live_through_kills(tmp_path / "store", 0, seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 163))
def test_soak_quota_and_order_hold_when_sigkill_meets_eviction(tmp_path, seed):
    live_through_kills(tmp_path / "store", SMALL_QUOTA, seed)
