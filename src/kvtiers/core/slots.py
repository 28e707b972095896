"""Slot numbers of one pool in one tier: the free ones, and how many are in each state.

A slot goes reserve -> acquire -> forfeit; who holds it in between is known to its holder (a run, a
lease, an operation), never to this file. Extents were tried instead of single numbers: they win a
tenth on large pages-of-one pools and fragment badly elsewhere (docs/decisions/0003).

Free slots stand in two places. Short arrays are copied into a small stack. Long ones are kept as
they were given, so that giving is an append and taking a view: pages of one token have as many
slots as tokens, and copying those twice per prompt was a tenth of the whole cache work. Arrays
that come from here share memory, hence nobody writes into one.
"""

from __future__ import annotations

import numpy as np

from kvtiers.types import SlotArray

_LONG = 1024
"""From so many slots on an array is kept instead of copied."""

_STACK_SLOTS = 4 * _LONG


class SlotStack:
    """Free slot numbers of one pool. `free` is the number of them."""

    __slots__ = ("_kept", "_stack", "_stacked", "capacity", "free", "quarantined")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = capacity
        self.quarantined = 0
        self._stack = np.empty(_STACK_SLOTS, np.int32)
        self._stacked = 0
        self._kept: list[SlotArray] = []  # each at least `_LONG`
        self._keep(np.arange(capacity - 1, -1, -1, dtype=np.int32))

    def take(self, count: int) -> SlotArray:
        """`count` slot numbers out of the free ones. The caller has checked `free >= count`."""
        self.free = free = self.free - count
        assert free >= 0, f"took {count} slots of {free + count} free"
        low = self._stacked - count
        if low >= 0:
            self._stacked = low
            return self._stack[low : low + count].copy()
        kept = self._kept
        if not kept or len(kept[-1]) < count:
            return self._gather(count)
        last = kept.pop()
        rest = len(last) - count
        if rest:
            self._keep(last[:rest])
            return last[rest:]
        return last

    def give(self, slots: SlotArray) -> None:
        """Slots nobody uses any more."""
        count = len(slots)
        self.free = free = self.free + count
        assert free <= self.capacity, (
            f"gave back {count} slots to {free - count} of {self.capacity} free"
        )
        low = self._stacked
        if count < _LONG and low + count <= _STACK_SLOTS:
            self._stack[low : low + count] = slots
            self._stacked = low + count
        else:
            self._keep(slots)

    def free_slots(self) -> SlotArray:
        """A copy of the free slot numbers, for audits."""
        return np.concatenate((*self._kept, self._stack[: self._stacked]))

    def _keep(self, slots: SlotArray) -> None:
        count = len(slots)
        if count >= _LONG:
            self._kept.append(slots)
            return
        low = self._stacked
        if low + count > _STACK_SLOTS:
            self._kept.append(self._stack[:low].copy())
            low = 0
        self._stack[low : low + count] = slots
        self._stacked = low + count

    def _gather(self, count: int) -> SlotArray:
        """Take what is stacked, and of what is kept as much as is missing then."""
        parts = []
        if self._stacked:
            parts.append(self._stack[: self._stacked].copy())
            count -= self._stacked
            self._stacked = 0
        while count:
            last = self._kept.pop()
            rest = len(last) - count
            if rest > 0:
                self._keep(last[:rest])
                last = last[rest:]
            count -= len(last)
            parts.append(last)
        return np.concatenate(parts)
