"""Slot numbers of one pool in one tier: a stack of free ones, and how many are in each state.

A slot goes reserve -> acquire -> forfeit; who holds it in between is known to its holder (a run, a
lease, an operation), never to this file. Extents were tried instead of single numbers: they win a
tenth on large pages-of-one pools and fragment badly elsewhere (docs/decisions/0003).
"""

from __future__ import annotations

import numpy as np

from kvtiers.types import SlotArray


class SlotStack:
    """Free slot numbers of one pool. `free` is the number of them."""

    __slots__ = ("_stack", "capacity", "free", "quarantined")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = capacity
        self.quarantined = 0
        self._stack = np.arange(capacity - 1, -1, -1, dtype=np.int32)

    def take(self, count: int) -> SlotArray:
        """`count` slot numbers out of the free ones. The caller has checked `free >= count`."""
        self.free = top = self.free - count
        assert top >= 0, f"took {count} slots of {top + count} free"
        return self._stack[top : top + count].copy()

    def give(self, slots: SlotArray) -> None:
        """Slots nobody uses any more."""
        top = self.free
        self.free = end = top + len(slots)
        assert end <= self.capacity, (
            f"gave back {len(slots)} slots to {top} of {self.capacity} free"
        )
        self._stack[top:end] = slots

    def free_slots(self) -> SlotArray:
        """A copy of the free slot numbers, for audits."""
        return self._stack[: self.free].copy()
