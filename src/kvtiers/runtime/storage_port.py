"""The storage side of the controller as a port: copies that may take long, or never end.

The live implementation is `StorageWorker` (threads around a store); the planner has one in virtual
time. Nothing here blocks, and every submitted order has exactly one result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from kvtiers.events import Copy, FactTuple, Lookup
from kvtiers.types import FailReason, StorageOp


class StorageResult(NamedTuple):
    """How a lookup (`EXISTS`), a prefetch (`READ`) or a store (`WRITE`) ended.

    `order_id` is the ticket of a lookup or the operation of a copy. `pages` is the answer, or how
    many leading pages arrived. From here on nothing of it touches a host slot. Times are monotonic
    seconds around the calls to the store; None when it was never begun.
    """

    op: StorageOp
    order_id: int
    pages: int
    failure: FailReason | None
    started: float | None
    finished: float | None


class StorageService(Protocol):
    """Carries out lookups, prefetches and stores."""

    def lookup(self, order: Lookup) -> None: ...
    def prefetch(self, order: Copy) -> None: ...
    def store(self, order: Copy) -> None: ...

    def abandon(self, op: StorageOp, order_id: int, reason: FailReason) -> None:
        """Nobody waits for this order any more: end it as soon as that is safe, with `reason`.

        A lookup or prefetch ends at once, a store after the call that is under way: until then
        the store may read the host pages.
        """
        ...

    def poll(self) -> list[StorageResult]:
        """Results since the last call."""
        ...

    def take_facts(self) -> list[FactTuple]:
        """`STORAGE_OP` facts since the last call, one per call to a store."""
        ...

    def on_result(self, callback: Callable[[], None]) -> None:
        """Call `callback`, from any thread and briefly, whenever `poll` has news."""
        ...

    def close(self, timeout_seconds: float) -> bool:
        """End everything with `SHUTDOWN`; False when a call to a store has not returned."""
        ...
