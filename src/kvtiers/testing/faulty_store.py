"""A store that misbehaves in every way a real one can, around one that works.

Delays, errors, losses and corruption are chosen by a seed and rates; hangs are switched on and off,
because a test must decide when a call that never returns does return after all.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

from kvtiers.storage.port import PageRef, PageStore, StoreStats
from kvtiers.types import FailReason, StorageOp


class FaultyStore:
    """Passes calls on to `inner`, unless a fault comes between.

    Rates are per call for `error_rate` (the call raises `OSError`) and per page for `loss_rate`
    (`MISSING`) and `corruption_rate` (`INTEGRITY`, the buffer is scribbled on). Reads that return
    from a hang scribble on their buffers too: a late write of the worst kind.
    """

    def __init__(
        self,
        inner: PageStore,
        seed: int = 0,
        *,
        error_rate: float = 0.0,
        loss_rate: float = 0.0,
        corruption_rate: float = 0.0,
        delay_seconds_max: float = 0.0,
    ) -> None:
        self.inner = inner
        self.name = inner.name
        self.calls_hanging = 0
        self._random = random.Random(seed)
        self._error_rate = error_rate
        self._loss_rate = loss_rate
        self._corruption_rate = corruption_rate
        self._delay_seconds_max = delay_seconds_max
        self._hanging_ops: frozenset[StorageOp] = frozenset()
        self._changed = threading.Condition()

    def hang(self, *ops: StorageOp) -> None:
        """Let every further call of these kinds hang until `release`."""
        with self._changed:
            self._hanging_ops = frozenset(ops)

    def release(self) -> None:
        """Let hanging calls return, and hang no more."""
        with self._changed:
            self._hanging_ops = frozenset()
            self._changed.notify_all()

    def wait_for_hanging(self, calls: int, timeout_seconds: float = 10.0) -> bool:
        """Block until so many calls hang."""
        with self._changed:
            return self._changed.wait_for(lambda: self.calls_hanging >= calls, timeout_seconds)

    def exists_prefix(self, refs: Sequence[PageRef]) -> int:
        self._disturb(StorageOp.EXISTS)
        return self.inner.exists_prefix(refs)

    def read_into(
        self, refs: Sequence[PageRef], buffers: Sequence[memoryview]
    ) -> list[FailReason | None]:
        hung = self._disturb(StorageOp.READ)
        outcomes = self.inner.read_into(refs, buffers)
        for index, buffer in enumerate(buffers):
            if hung or self._happens(self._corruption_rate):
                buffer[:] = self._random.randbytes(buffer.nbytes)
                outcomes[index] = FailReason.INTEGRITY
            elif self._happens(self._loss_rate):
                outcomes[index] = FailReason.MISSING
        return outcomes

    def write_from(
        self, refs: Sequence[PageRef], buffers: Sequence[memoryview]
    ) -> list[FailReason | None]:
        self._disturb(StorageOp.WRITE)
        return self.inner.write_from(refs, buffers)

    def delete(self, refs: Sequence[PageRef]) -> int:
        self._disturb(StorageOp.DELETE)
        return self.inner.delete(refs)

    def clear(self) -> int:
        self._disturb(StorageOp.CLEAR)
        return self.inner.clear()

    def stats(self) -> StoreStats:
        return self.inner.stats()

    def close(self) -> None:
        self.inner.close()

    def _happens(self, rate: float) -> bool:
        return rate > 0 and self._random.random() < rate

    def _disturb(self, op: StorageOp) -> bool:
        """Delay, hang or raise; returns whether the call hung."""
        hung = False
        with self._changed:
            if op in self._hanging_ops:
                hung = True
                self.calls_hanging += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: op not in self._hanging_ops)
                self.calls_hanging -= 1
        if self._delay_seconds_max:
            time.sleep(self._random.uniform(0, self._delay_seconds_max))
        if self._happens(self._error_rate):
            raise OSError(f"injected: the store failed in {op}")
        return hung
