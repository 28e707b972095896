"""A host tier is sized against what the machine and its control groups really have."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from kvtiers.errors import ConfigError
from kvtiers.transfer.host_memory import (
    GIB,
    RESERVE_BYTES,
    allocate,
    available_host_bytes,
    check_fits,
)

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    write(tmp_path, "proc/meminfo", "MemTotal: 64000000 kB\nMemAvailable: 33554432 kB\n")
    return tmp_path


def test_without_control_groups_the_machine_says_what_is_available(machine: Path) -> None:
    assert available_host_bytes(machine) == 32 * GIB


def test_a_version_2_group_bounds_it_and_page_cache_counts_as_free(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "0::/app.slice/server\n")
    group = "sys/fs/cgroup/app.slice/server"
    write(machine, f"{group}/memory.max", str(8 * GIB))
    write(machine, f"{group}/memory.current", str(5 * GIB))
    write(machine, f"{group}/memory.stat", f"anon 1\ninactive_file {2 * GIB}\n")
    assert available_host_bytes(machine) == 5 * GIB


def test_the_tightest_ancestor_decides(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "0::/pod/server\n")
    for group, limit in (("pod", str(6 * GIB)), ("pod/server", "max")):
        write(machine, f"sys/fs/cgroup/{group}/memory.max", limit)
        write(machine, f"sys/fs/cgroup/{group}/memory.current", str(2 * GIB))
        write(machine, f"sys/fs/cgroup/{group}/memory.stat", "inactive_file 0\n")
    assert available_host_bytes(machine) == 4 * GIB


def test_a_group_seen_at_the_mount_point_of_its_container_counts(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "0::/on/the/host/only\n")
    write(machine, "sys/fs/cgroup/memory.max", str(3 * GIB))
    write(machine, "sys/fs/cgroup/memory.current", str(GIB))
    write(machine, "sys/fs/cgroup/memory.stat", "inactive_file 0\n")
    assert available_host_bytes(machine) == 2 * GIB


def test_a_version_1_group_bounds_it(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "5:cpu:/x\n4:memory:/docker/abc\n")
    group = "sys/fs/cgroup/memory/docker/abc"
    write(machine, f"{group}/memory.limit_in_bytes", str(2 * GIB))
    write(machine, f"{group}/memory.usage_in_bytes", str(GIB))
    write(machine, f"{group}/memory.stat", "total_inactive_file 0\n")
    assert available_host_bytes(machine) == GIB


def test_a_system_that_does_not_tell_refuses_nothing(tmp_path: Path) -> None:
    assert available_host_bytes(tmp_path) is None


def test_this_machine_tells() -> None:
    available = available_host_bytes()
    assert available is not None
    assert available > 0


def test_tiers_that_do_not_fit_are_refused_with_asked_available_and_the_way_out() -> None:
    with pytest.raises(ConfigError) as refused:
        check_fits(4 * GIB, "the tiers", available_bytes=2 * GIB)
    message = str(refused.value)
    assert "the tiers need 4.00 GiB" in message
    assert "2.00 GiB are available" in message
    assert "at most 1.50 GiB" in message
    check_fits(2 * GIB - RESERVE_BYTES, "the tiers", available_bytes=2 * GIB)


def test_more_than_this_machine_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="available here"):
        check_fits(1 << 60, "the tiers")


def huge_bytes(address: int) -> int:
    """Bytes of huge pages in the mapping around an address, as the kernel tells."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            begin, _, end = first.partition("-")
            inside = int(begin, 16) <= address < int(end, 16)
        elif inside and first in ("AnonHugePages:", "ShmemPmdMapped:") and int(rest[0]):
            return int(rest[0]) * 1024
    return 0


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(),
    reason="this system has no transparent huge pages, or they are switched off",
)
def test_a_host_tier_is_made_of_huge_pages() -> None:
    memory = allocate(32 << 20)
    assert huge_bytes(memory.ctypes.data + (16 << 20)) > 0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell")
def test_all_of_it_is_taken_at_once_and_goes_with_the_last_view() -> None:
    before = resident_bytes()
    memory = allocate(64 << 20)
    view = memory[1 << 20 :]
    del memory
    assert resident_bytes() - before > 60 << 20
    del view
    assert resident_bytes() - before < 4 << 20
