"""Host memory: how much of it there is to take, and taking it.

Owns: the reading of the machine's and the control groups' limits, the refusal of tiers that
do not fit, and the allocation of page-aligned, touched memory. Must not know: pools' contents,
copies, or the cache.

A host tier is taken in full at start: memory that is promised and not touched would be found
missing in the middle of a copy, by the kernel, with a kill.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtiers.errors import ConfigError

GIB = 1 << 30
RESERVE_BYTES = GIB // 2
"""Left to the rest of the process and the machine."""


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that could be taken now without swapping or hitting a control group's limit.

    The smallest of `MemAvailable` and, for this process's control group (v2 or v1) and each of its
    ancestors, the limit less what cannot be reclaimed. `root` stands for the file system's root.
    None where the system does not tell (no `/proc/meminfo`).
    """
    available = _meminfo_available(root)
    if available is None:
        return None
    for limit, used in _cgroup_limits(root):
        available = min(available, max(0, limit - used))
    return available


def _meminfo_available(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def _cgroup_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, unreclaimable use) in bytes of every control group that bounds this process."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[int, int]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            base = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            base = root / "sys/fs/cgroup/memory"
        else:
            continue
        group = base / path.lstrip("/")
        # A container may see its own group mounted at the base while the path names the host's.
        for directory in [group, *group.parents]:
            pair = _one_limit(directory, *names)
            if pair is not None:
                found.append(pair)
            if directory == base:
                break
    return found


def _one_limit(directory: Path, limit: str, usage: str, cache: str) -> tuple[int, int] | None:
    try:
        text = (directory / limit).read_text().strip()
        if text == "max":
            return None
        used = int((directory / usage).read_text())
        for line in (directory / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == cache:
                used -= int(value)
    except (OSError, ValueError):
        return None
    return int(text), max(0, used)


def check_fits(asked_bytes: int, what: str, available_bytes: int | None = None) -> None:
    """Raise `ConfigError` where `asked_bytes` for `what` are more than is there, less a reserve.

    `available_bytes` None: ask the machine; one that does not tell is given the benefit of doubt.
    """
    if available_bytes is None:
        available_bytes = available_host_bytes()
    if available_bytes is None:
        return
    limit = max(0, available_bytes - RESERVE_BYTES)
    if asked_bytes > limit:
        raise ConfigError(
            f"{what} need {_gib(asked_bytes)} of memory; {_gib(available_bytes)} are available "
            f"here (control groups included) and {_gib(RESERVE_BYTES)} of that stay reserved; ask "
            f"for at most {_gib(limit)} in all, free memory, or raise the container's limit"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def allocate(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed memory that starts at a page boundary and is really there (every page was touched).

    Made of huge pages where the system gives them on request: a copy of scattered slots otherwise
    spends much of its time in the TLB. Private to this process: a child that is forked sees the
    content of that moment, and nothing that is written after. Freed with the last view of it.
    """
    if hasattr(mmap, "MAP_PRIVATE"):
        # Python's default is shared memory, which is of small pages on nearly every system, asked
        # or not: its huge pages have a switch of their own (`shmem_enabled`), and it is off.
        area = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        area = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            area.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # built without huge pages: small ones work as well, more slowly
    memory = np.frombuffer(area, dtype=np.uint8)
    memory[:: mmap.PAGESIZE] = 0
    return memory
