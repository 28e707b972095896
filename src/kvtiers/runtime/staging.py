"""A staging area: where a read lands that may never return, or return too late.

Owns: one piece of aligned memory per reading thread, cut into pages of every pool. A read that
hangs holds on to its thread and its staging and can harm nothing else: what it writes late, it
writes here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtiers.transfer.host_memory import allocate
from kvtiers.types import PoolSpec

ALIGNMENT_BYTES = 4096
"""Direct I/O wants memory aligned to the device's blocks; none is larger than this."""


def staging_pages(pools: Sequence[PoolSpec], staging_bytes: int) -> int:
    """How many pages, each with its part in every pool, fit into `staging_bytes`; at least one."""
    return max(1, staging_bytes // sum(_stride(pool) for pool in pools))


class StagingArea:
    """Room for `pages` pages of each pool.

    The memory is taken and touched at once: a reader that did so at its first read would make a
    request wait for it, longer than for the read itself.
    """

    def __init__(self, pools: Sequence[PoolSpec], pages: int) -> None:
        self.pages = pages
        self._bytes = {pool.name: pool.bytes_per_slot for pool in pools}
        self._memory: dict[str, npt.NDArray[np.uint8]] = {
            pool.name: allocate(pages * _stride(pool)).reshape(pages, -1) for pool in pools
        }

    def page(self, pool: str, index: int) -> npt.NDArray[np.uint8]:
        """The bytes of page `index` of a pool, to be read into and copied from."""
        row: npt.NDArray[np.uint8] = self._memory[pool][index, : self._bytes[pool]]
        return row


def _stride(pool: PoolSpec) -> int:
    return -(-pool.bytes_per_slot // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
