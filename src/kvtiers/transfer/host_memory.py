"""Host memory: how much of it there is to take, and taking it.

Owns: the reading of the machine's and the control groups' limits, the refusal of a host tier that
does not fit, and the allocation of page-aligned, touched memory. Must not know: pools' contents,
copies, or the cache.

A host tier is taken in full at start: memory that is promised and not touched would be found
missing in the middle of a copy, by the kernel, with a kill.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtiers.errors import ConfigError
from kvtiers.types import PoolSpec

GIB = 1 << 30
RESERVE_BYTES = GIB // 2
"""Left to the rest of the process and the machine when a host tier is sized."""


def available_host_bytes(root: Path = Path("/")) -> int:
    """Bytes that could be taken now without swapping or hitting a control group's limit.

    The smallest of `MemAvailable` and, for this process's control group (v2 or v1) and each of its
    ancestors, the limit less what cannot be reclaimed. `root` stands for the file system's root.
    Raises `ConfigError` where the system does not tell (no `/proc/meminfo`).
    """
    available = _meminfo_available(root)
    for limit, used in _cgroup_limits(root):
        available = min(available, max(0, limit - used))
    return available


def _meminfo_available(root: Path) -> int:
    path = root / "proc/meminfo"
    try:
        for line in path.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024
    except OSError as error:
        raise ConfigError(f"cannot tell how much host memory is available: {error}") from error
    raise ConfigError(f"cannot tell how much host memory is available: no MemAvailable in {path}")


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


def host_slots(
    asked_bytes: int, pools: Sequence[PoolSpec], available_bytes: int | None = None
) -> int:
    """Slots that `asked_bytes` of host memory hold, for `kv` and all pools that follow it.

    Raises `ConfigError` when not even one slot fits, or when `asked_bytes` is more than what is
    available less a reserve. `available_bytes` None: ask the machine.
    """
    per_slot = sum(p.bytes_per_slot for p in pools if (p.follows or p.name) == "kv")
    if per_slot == 0:
        raise ConfigError(f"no pool 'kv' among {[p.name for p in pools]}; it anchors the host tier")
    if available_bytes is None:
        available_bytes = available_host_bytes()
    limit = available_bytes - RESERVE_BYTES
    if asked_bytes > limit:
        raise ConfigError(
            f"a host tier of {_gib(asked_bytes)} was asked for, {_gib(available_bytes)} are "
            f"available here (control groups included) and {_gib(RESERVE_BYTES)} of that stay "
            f"reserved; ask for at most {_gib(max(0, limit))}, free memory, or raise the "
            "container's memory limit"
        )
    slots = asked_bytes // per_slot
    if slots < 1:
        raise ConfigError(
            f"a host tier of {asked_bytes} bytes was asked for, one page takes {per_slot} bytes; "
            "ask for more, use smaller pages, or 0 for no host tier"
        )
    return slots


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def allocate(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed memory that starts at a page boundary and is really there (every page was touched).

    Huge pages are asked for where the system offers them: a copy of scattered slots otherwise
    spends much of its time in the TLB. The memory is freed with the last view of it.
    """
    area = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            area.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # built without huge pages: small ones work as well, more slowly
    memory = np.frombuffer(area, dtype=np.uint8)
    memory[:: mmap.PAGESIZE] = 0
    return memory
