"""Copies between device and host: ordering backups and load-backs, and applying how they ended.

Acknowledgements arrive in any order and are applied in order of issue per purpose, so a tail is
never resident before its head. A run has at most one backup in flight. Failure is an outcome: the
target slots are forfeited, or quarantined while the copy may still write them; leases that rely on
a failed load are voided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtiers.core.operations import Operation
from kvtiers.core.stores import first_unstored
from kvtiers.events import Copy, Fact
from kvtiers.types import (
    DeclineReason,
    FailReason,
    Purpose,
    SlotArray,
    StoreOn,
    WritePolicy,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvtiers.core.host_tier import HostTier
    from kvtiers.core.lease import Lease
    from kvtiers.core.state import CacheState
    from kvtiers.core.stores import Stores
    from kvtiers.core.tree import Run


_FAILED_LOADS_MAX = 4096

# Bound once: finding a member on its enum takes longer than what is done with it (Python 3.11).
_BACKUP = Purpose.BACKUP


class Copies:
    def __init__(self, state: CacheState, host: HostTier, stores: Stores) -> None:
        self._state = state
        self._host = host
        self._stores = stores
        config = state.config
        self._selective = config.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        self._stores_on_backup = config.store_on is StoreOn.BACKUP
        self._in_flight_bound = config.backup_in_flight_pages
        self.failed_loads: dict[int, int] = {}
        """request id -> first page that could not be loaded for it; its next attempt avoids it."""

    # ---- device -> host

    def backup_room(self) -> int:
        """Pages that may still be ordered before the bound on backups in flight is reached."""
        return self._in_flight_bound - self._state.pages_in_flight[_BACKUP]

    def oldest_victim(self, before: Run) -> Run | None:
        """The oldest victim on its way to host, if it is older than `before`.

        It will be the first to leave host again, so nothing younger may make room before it.
        """
        state = self._state
        age = state.device_order.age
        victims = [
            each.run
            for each in state.issued[Purpose.BACKUP]
            if not each.needs_head and not each.run.locks and age(each.run) < age(before)
        ]
        return min(victims, key=age) if victims else None

    def back_up_path(self, run: Run) -> None:
        """Order a backup of what the path to `run` has on device only, parents first.

        As much as host has room for; what it has no room for is declined, and met again by the
        next commit on this path or by eviction.
        """
        state = self._state
        selective = self._selective
        deepest = None
        first = missing = 0
        while run.parent is not None and run.backup is None and run.host_end < run.pages:
            if selective and run.uses < 2:
                # too cold; what is above it has been used at least as often
                run = run.parent
                continue
            if deepest is None:
                deepest = run
            first = run.start + run.host_end
            missing += run.pages - run.host_end
            if run.host_end:
                break
            run = run.parent
        if deepest is None:
            return
        host = state.host
        if missing > host.free:
            self._host.make_room(missing)
        bound = self.backup_room()
        got = missing
        if got > host.free or got > bound:
            got = min(host.free, bound)
            reason = DeclineReason.IN_FLIGHT_BOUND if bound == got else DeclineReason.HOST_CAPACITY
            state.facts.append((Fact.DECLINED, Purpose.BACKUP, reason, missing - got))
            if got <= 0:
                return
        self._order_backup(deepest, first, first + got, needs_head=True)

    def save(self, run: Run, first: int, end: int) -> None:
        """Order a backup of pages `[first, end)` of one run, counted from the run's start."""
        self._order_backup(run, run.start + first, run.start + end, needs_head=False)

    def clean(self, run: Run, spare: Collection[Run]) -> bool:
        """Order a backup of what the run has on device only; False: host has no room for all of it.

        Host copies of the runs in `spare` make no room for it.
        """
        device = run.device_pages
        first, end = 0, device
        if run.host_end > run.host_start:
            first = run.host_end if run.host_end < device else 0
            end = device if first else run.host_start
        if first >= end:
            return True
        self._host.make_room(end - first, for_victim=run, spare=spare)
        if end < device and run.host_start != end:
            # Making room took mirrors of this very run: what comes before them has moved.
            return True
        got = min(end - first, self._state.host.free, self.backup_room())
        must_be_whole = end < device  # it comes before what is on host: no hole between them
        if got > 0 and (got == end - first or not must_be_whole):
            self.save(run, first, first + got)
        return got == end - first

    def _order_backup(self, run: Run, first_page: int, end_page: int, needs_head: bool) -> None:
        state = self._state
        while run.start >= end_page:
            run = run.parent
        target = state.host.take(end_page - first_page)
        operation = Operation(state.next_id(), _BACKUP, run, first_page, end_page, target)
        operation.needs_head = needs_head
        sources = []
        for each in operation.runs():
            each.backup = operation
            low, high = first_page - each.start, end_page - each.start
            source = each.device_slots
            if low > 0 or high < len(source):
                source = source[max(0, low) : high]
            sources.append(source)
        self._order(operation, _joined(sources))

    def _apply_backup(self, operation: Operation) -> None:
        state = self._state
        first = operation.first_page
        ok = operation.pages_ok or 0
        runs = operation.runs()
        if operation.needs_head and ok and not _has_head(runs[-1], first):
            ok = 0
            operation.failure = FailReason.ORPHANED
        ok_end = first + ok
        arrived = 0
        for run in reversed(runs):
            run.backup = None
            start = run.start
            low = first - start if first > start else 0
            high = ok_end - start
            if high > run.pages:
                high = run.pages
            slots = operation.target
            if high - low < len(slots):
                slots = slots[start + low - first : start + high - first]
            if high <= low:
                pass
            elif _attach(run, low, high, slots):
                arrived += high - low
                if not run.locks:
                    state.host_order.update(run)
                    state.host_evictable += high - low
            else:
                operation.failure = operation.failure or FailReason.ORPHANED
                high, ok_end = low, first  # what follows would be a tail without its head
            if not operation.needs_head:
                # A victim that could not be saved is lost at the next eviction, not tried again.
                run.copy_failed = min(run.pages, operation.end_page - run.start) > high
        state.settle_target(state.host, operation, arrived)
        state.tree.epoch += 1
        state.book_ack(operation, arrived)
        if arrived and state.storage_attached and self._stores_on_backup:
            self._store_path(operation.run)

    def _store_path(self, run: Run) -> None:
        """Store the path; where a head is on device only, copy it to host for the purpose."""
        gap = self._stores.order(run)
        if gap is None or gap.backup is not None or gap.copy_failed or not gap.device_pages:
            return
        missing = _unsaved_head(gap)
        # What has just been saved below the gap must not go for it: an eviction waits for that.
        self._host.make_room(missing, for_victim=gap, spare=run.path())
        if missing > min(self._state.host.free, self.backup_room()):
            self._state.facts.append(
                (Fact.DECLINED, Purpose.STORE, DeclineReason.PARENT_MISSING, missing)
            )
        elif missing > 0:
            begin = first_unstored(gap)
            self.save(gap, begin, begin + missing)

    # ---- host -> device

    def load_back(self, lease: Lease, run: Run, first_page: int, target: SlotArray) -> None:
        """Order the load of the path's host-only pages `[first_page, run.end)` for a lease.

        The runs own the target slots from now on, never the lease: other leases join, and an
        abort changes nothing. The operation locks the path, because a device page above must not
        leave while one below is arriving.
        """
        state = self._state
        operation = Operation(state.next_id(), Purpose.LOAD_BACK, run, first_page, run.end, target)
        sources = []
        for each in operation.runs():
            low = each.device_pages
            sources.append(each.host_slots[low - each.host_start :])
            begin = each.start + low - first_page
            arriving = target[begin : begin + each.pages - low]
            each.device_slots = np.concatenate((each.device_slots, arriving)) if low else arriving
            each.load = operation
        operation.waiters.append(lease)
        lease.loads.append(operation)
        state.lock(run)
        self._order(operation, _joined(sources))

    def _apply_load(self, operation: Operation) -> None:
        state = self._state
        first = operation.first_page
        ok = operation.pages_ok or 0
        runs = operation.runs()
        above = runs[-1].parent
        if ok and above.parent is not None and above.device_pages < above.pages:
            ok = 0  # the load of its head failed
            operation.failure = FailReason.ORPHANED
        ok_end = first + ok
        for run in runs:
            run.load = None
            run.device_pages = max(run.device_pages, min(run.pages, ok_end - run.start))
            run.device_slots = run.device_slots[: run.device_pages]
        for lease in operation.waiters:
            lease.loads.remove(operation)
            if ok < operation.pages:
                lease.voided = True
                self._remember_failed_load(lease.request_id, ok_end)
        operation.waiters.clear()
        state.settle_target(state.device, operation, ok)
        state.tree.epoch += 1
        state.book_ack(operation, ok)
        state.unlock(operation.run)

    def _remember_failed_load(self, request_id: int, page: int) -> None:
        """Kept until the request ends otherwise; bounded, for requests that never come back.

        A second failure says that loading does not work for it now: nothing of host is tried
        again, so a request is voided at most twice whatever the link does.
        """
        if request_id in self.failed_loads:
            page = 0
        while len(self.failed_loads) >= _FAILED_LOADS_MAX:
            del self.failed_loads[next(iter(self.failed_loads))]
        self.failed_loads[request_id] = page

    # ---- common

    def apply(self, purpose: Purpose) -> None:
        """Apply the acknowledged operations of a purpose, in order of issue."""
        queue = self._state.issued[purpose]
        apply = self._apply_backup if purpose is _BACKUP else self._apply_load
        while queue and queue[0].pages_ok is not None:
            apply(queue.popleft())

    def _order(self, operation: Operation, source: SlotArray) -> None:
        self._state.register(operation)
        self._state.orders.append(
            Copy(
                operation.op_id,
                operation.purpose,
                operation.first_page,
                operation.pages,
                source,
                operation.target,
            )
        )


def _joined(deepest_first: list[SlotArray]) -> SlotArray:
    if len(deepest_first) == 1:
        return deepest_first[0]
    deepest_first.reverse()
    return np.concatenate(deepest_first)


def _unsaved_head(run: Run) -> int:
    """Pages past the stored ones that are on device only, up to where the host part begins."""
    on_host = run.host_end > run.host_start
    return (run.host_start if on_host else run.device_pages) - first_unstored(run)


def _has_head(run: Run, first_page: int) -> bool:
    """Whether the page before `first_page`, which lies in `run` or at its end above, is on host."""
    inside = first_page - run.start
    if inside > 0:
        return run.host_end == inside
    above = run.parent
    return above.parent is None or (above.pages > 0 and above.host_end == above.pages)


def _attach(run: Run, low: int, high: int, slots: SlotArray) -> bool:
    """Pages `[low, high)` have arrived on host; False where that would leave a hole."""
    if run.host_end == run.host_start:
        run.host_start, run.host_end, run.host_slots = low, high, slots
    elif run.host_end == low:
        run.host_slots = np.concatenate((run.host_slots, slots))
        run.host_end = high
    elif run.host_start == high:
        run.host_slots = np.concatenate((slots, run.host_slots))
        run.host_start = low
    else:
        return False
    return True
