"""Copies from host to storage: parents first, so that storage never holds a tail without its head.

A store may begin only where everything above is acknowledged as stored. `stored_pages` of a run is
a hint (other processes evict there); it says what need not be stored again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtiers.core.operations import Operation
from kvtiers.core.tree import NO_SLOTS
from kvtiers.events import Copy, Fact
from kvtiers.types import DeclineReason, FailReason, Purpose, StoreOn

if TYPE_CHECKING:
    from kvtiers.core.state import CacheState
    from kvtiers.core.tree import Run


class Stores:
    def __init__(self, state: CacheState) -> None:
        self._state = state

    def order(self, run: Run) -> Run | None:
        """Order the store of what the path to `run` has on host and storage lacks.

        Returns the first run whose next page is not on host and stands in the way, or None. Where
        a store on the path is in flight nothing is ordered: its acknowledgement comes back here.
        """
        state = self._state
        path: list[Run] = []
        while run.parent is not None and run.stored_pages < run.pages:
            if run.store is not None:
                return None
            path.append(run)
            run = run.parent
        if not path:
            return None
        path.reverse()
        first = end = path[0].start + path[0].stored_pages
        gap = None
        deepest = None
        for each in path:
            begin = first_unstored(each)
            if each.host_start > begin or each.host_end <= begin:
                gap = each
                break
            deepest = each
            end = each.start + each.host_end
            if each.host_end < each.pages:
                gap = each
                break
        if deepest is None:
            return gap
        bound = state.config.store_in_flight_pages - state.pages_in_flight[Purpose.STORE]
        if end - first > bound:
            declined = end - first - max(bound, 0)
            state.facts.append(
                (Fact.DECLINED, Purpose.STORE, DeclineReason.IN_FLIGHT_BOUND, declined)
            )
            end = first + max(bound, 0)
        if end == first:
            return None
        while deepest.start >= end:
            deepest = deepest.parent
        self._issue(deepest, first, end)
        return gap

    def apply(self, operation: Operation) -> None:
        """A store was acknowledged; stores have no residency to order, so each is applied at once.

        A late one keeps its hold on the host pages: the store may still be reading them, and bytes
        of a slot's next owner must never reach storage under this page's name.
        """
        state = self._state
        ok_end = operation.first_page + (operation.pages_ok or 0)
        failed = ok_end < operation.end_page
        runs = operation.runs()
        for run in runs:
            if not operation.late:
                run.store = None
            low = max(0, operation.first_page - run.start)
            high = min(run.pages, ok_end - run.start)
            if high > low and run.stored_pages >= low:
                run.stored_pages = max(run.stored_pages, high)
            run.store_failed = failed and run.end > ok_end
        if operation.failure is FailReason.ORPHANED:
            self._forget_path(operation.run)
        state.issued[Purpose.STORE].remove(operation)
        state.book_ack(operation, ok_end - operation.first_page)
        if state.storage_attached and state.config.store_on is StoreOn.BACKUP:
            self._order_below(runs[-1])

    def settle(self, operation: Operation) -> None:
        """A late store has ended: nobody reads its host pages any more."""
        for run in operation.runs():
            run.store = None

    def forget(self) -> None:
        """Storage is gone or another one: what was known of it is void."""
        for run in self._state.tree.walk():
            run.stored_pages = 0
            run.store_failed = False

    def _forget_path(self, run: Run) -> None:
        """Storage has lost the head of this path: the next store on it begins at the root.

        What hangs below a lost head is lost with it, so the hints of all branches go.
        """
        below = run.path()[:1]
        for each in below:
            each.stored_pages = 0
            below.extend(each.children.values())

    def _order_below(self, run: Run) -> None:
        """What waited for its parent to be stored; children of one run are independent paths.

        `run` is the uppermost of what has been stored: a split may have hung a branch there.
        """
        below = [run]
        for each in below:
            if each.stored_pages < each.pages:
                if each.host_end > each.stored_pages >= each.host_start and not each.store_failed:
                    self.order(each)
                continue
            below.extend(each.children.values())

    def _issue(self, run: Run, first: int, end: int) -> None:
        state = self._state
        operation = Operation(state.next_id(), Purpose.STORE, run, first, end, NO_SLOTS)
        sources = []
        for each in operation.runs():
            each.store = operation
            low = max(0, first - each.start) - each.host_start
            high = min(each.host_end, end - each.start) - each.host_start
            sources.append(each.host_slots[low:high])
        sources.reverse()
        page_bytes = state.tree.page_bytes
        path = run.path()
        root = path[0].parent
        path_key = b"".join(each.key for each in path)
        state.register(operation)
        state.orders.append(
            Copy(
                operation.op_id,
                Purpose.STORE,
                first,
                end - first,
                np.concatenate(sources),
                None,
                state.tree.namespaces[root.key],
                path_key[: end * page_bytes],
            )
        )


def first_unstored(run: Run) -> int:
    """The page of the run at which a store on its path begins or goes on.

    Where the run above is not wholly stored that is 0, whatever storage held of this one before:
    a store is one stretch of pages, and pages that are there already cost nothing.
    """
    above = run.parent
    return run.stored_pages if above.stored_pages == above.pages else 0
