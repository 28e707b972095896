"""What the parts of the core share: tree, slots, frontiers, operations, and what goes out.

Invariants (checked by `audit`):

    an unlocked run's whole subtree is unlocked
    a run is in the device frontier  <=>  unlocked and device_pages > 0
    a run is in the host frontier    <=>  unlocked and host_end > host_start
    device_evictable = pages of the device frontier,  host_evictable likewise
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvtiers.core.ghosts import Ghosts
from kvtiers.core.policies import new_order
from kvtiers.core.retention import HostOrder, new_host_order
from kvtiers.core.slots import SlotStack
from kvtiers.core.tree import Run, Tree
from kvtiers.events import Fact, FactTuple, WorkOrder
from kvtiers.types import (
    CacheConfig,
    LeaveOutcome,
    LeaveReason,
    Purpose,
    SlotArray,
    Tier,
    WritePolicy,
)

if TYPE_CHECKING:
    from kvtiers.core.lease import Lease
    from kvtiers.core.operations import Operation


# Bound once: finding a member on its enum takes longer than what is done with it (Python 3.11).
_ISSUED, _ACKED, _LEFT = Fact.ISSUED, Fact.ACKED, Fact.LEFT


class CacheState:
    """Owns the books of the structure; decides nothing."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.tree = Tree(config.page_tokens)
        self.device = SlotStack(config.device_pages)
        self.host = SlotStack(config.host_pages)
        self.device_order = new_order(config.eviction)
        self.host_order: HostOrder = new_host_order(config.retention, config.eviction)
        self.has_host = config.host_pages > 0
        self.counts_uses = (
            self.device_order.counts_uses
            or config.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        )
        self.device_evictable = 0
        self.host_evictable = 0
        self.storage_attached = config.storage
        ghost_pages = config.ghost_pages
        if ghost_pages is None:
            ghost_pages = config.device_pages + config.host_pages
        self.ghosts = Ghosts(ghost_pages, self.tree)

        self.backs_up_on_commit = (
            self.has_host and config.write_policy is not WritePolicy.WRITE_BACK
        )
        self.leases: dict[int, Lease] = {}
        self.operations: dict[int, Operation] = {}
        self.issued: dict[Purpose, deque[Operation]] = {purpose: deque() for purpose in Purpose}
        self.pages_in_flight: dict[Purpose, int] = dict.fromkeys(Purpose, 0)
        self.facts: list[FactTuple] = []
        self.orders: list[WorkOrder] = []
        self._last_id = 0
        self._last_stamp = 0

    def next_id(self) -> int:
        """Names for leases, operations, tickets and pins; one sequence, so none is reused."""
        self._last_id += 1
        return self._last_id

    # ---- locks: a run's count is own leases + locked children

    def lock(self, run: Run) -> None:
        """Nothing from the root down to the end of `run` leaves the device or the host.

        Walks up only as far as it meets a run that is locked already, so a prefix that many
        requests share costs each of them one step.
        """
        device_discard = self.device_order.discard
        has_host = self.has_host
        while True:
            locks = run.locks
            run.locks = locks + 1
            if locks:
                return
            if run.device_pages:
                device_discard(run)
                self.device_evictable -= run.device_pages
            if has_host and run.host_end > run.host_start:
                self.host_order.discard(run)
                self.host_evictable -= run.host_end - run.host_start
            run = run.parent

    def unlock(self, run: Run) -> None:
        """Undo one `lock`. What becomes unlocked is the youngest now, leaf first."""
        device_add = self.device_order.add
        has_host = self.has_host
        while True:
            locks = run.locks = run.locks - 1
            if locks:
                return
            self._last_stamp = run.stamp = self._last_stamp + 1
            if run.device_pages:
                device_add(run)
                self.device_evictable += run.device_pages
            if has_host and run.host_end > run.host_start:
                self.host_order.add(run)
                self.host_evictable += run.host_end - run.host_start
            run = run.parent

    def hand_down(self, run: Run, child: Run) -> None:
        """`lock(child)` and `unlock(run)` for a lock held on `run`, at the price of one step.

        Where the child was unlocked its run's count stays: an own lease becomes a locked child.
        """
        if child.locks:
            child.locks += 1
            run.locks -= 1
            return
        child.locks = 1
        if child.device_pages:
            self.device_order.discard(child)
            self.device_evictable -= child.device_pages
        if self.has_host and child.host_end > child.host_start:
            self.host_order.discard(child)
            self.host_evictable -= child.host_end - child.host_start

    def split(self, run: Run, pages: int) -> Run:
        """Cut a run; returns the upper half, which the caller locks at once.

        The lower half keeps its place in the frontiers. The upper one has none: it is about to be
        locked, and re-enters when it is released.
        """
        upper = self.tree.split(run, pages)
        if run.locks:
            upper.locks = 1
        else:
            if not run.device_pages:
                self.device_order.discard(run)
            if self.has_host:
                self.host_order.update(run)
        return upper

    def divide(self, run: Run, pages: int) -> None:
        """Cut an unlocked run that stays unlocked: both halves are listed, as old as it was."""
        upper = self.split(run, pages)
        self.device_order.enter(upper)
        self.host_order.update(upper)

    # ---- operations

    def register(self, operation: Operation) -> None:
        op_id, purpose, pages = operation.op_id, operation.purpose, operation.pages
        self.operations[op_id] = operation
        self.issued[purpose].append(operation)
        self.pages_in_flight[purpose] += pages
        self.facts.append((_ISSUED, op_id, purpose, pages))

    def settle_target(self, stack: SlotStack, operation: Operation, ok_pages: int) -> None:
        """Give back the target slots past `ok_pages`, or quarantine them if the copy still runs."""
        if ok_pages == operation.pages and not operation.late:
            return
        rest: SlotArray = operation.target[ok_pages:]
        if operation.late:
            stack.quarantined += len(rest)
            operation.target = rest
        elif len(rest):
            stack.give(rest)

    def book_ack(self, operation: Operation, ok_pages: int) -> None:
        """The wait for an operation is over; a late one stays known until it has ended."""
        operation.applied = True
        self.pages_in_flight[operation.purpose] -= operation.pages
        missing = operation.pages - ok_pages
        self.facts.append(
            (
                _ACKED,
                operation.op_id,
                operation.purpose,
                ok_pages,
                0 if operation.late else missing,
                missing if operation.late else 0,
                operation.failure if missing else None,
            )
        )
        if not operation.late:
            del self.operations[operation.op_id]

    # ---- copies that leave

    def forget_pages(self, run: Run, first: int, tier: Tier, reason: LeaveReason) -> None:
        """Pages `[first, run.pages)` of the run are about to leave their last tier."""
        if self.ghosts.capacity:
            self.ghosts.remember(run, first, tier, reason)

    def book_left(self, tier: Tier, outcome: LeaveOutcome, reason: LeaveReason, pages: int) -> None:
        if pages:
            self.facts.append((_LEFT, tier, outcome, reason, pages))
