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


class StagingArea:
    """Room for `pages` pages of each pool, allocated and touched when first needed."""

    def __init__(self, pools: Sequence[PoolSpec], staging_bytes: int) -> None:
        self._strides = {
            p.name: -(-p.bytes_per_slot // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for p in pools
        }
        self._bytes = {p.name: p.bytes_per_slot for p in pools}
        self.pages = max(1, staging_bytes // sum(self._strides.values()))
        self._memory: dict[str, npt.NDArray[np.uint8]] = {}

    def page(self, pool: str, index: int) -> npt.NDArray[np.uint8]:
        """The bytes of page `index` of a pool, to be read into and copied from."""
        memory = self._memory.get(pool)
        if memory is None:
            memory = allocate(self.pages * self._strides[pool]).reshape(self.pages, -1)
            self._memory[pool] = memory
        row: npt.NDArray[np.uint8] = memory[index, : self._bytes[pool]]
        return row
