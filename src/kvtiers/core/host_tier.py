"""The host tier gives up pages: whose, in which order, and with what outcome."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from kvtiers.core.tree import NO_SLOTS
from kvtiers.core.victims import held_on_host, victims
from kvtiers.types import LeaveOutcome, LeaveReason, StoreOn, Tier

if TYPE_CHECKING:
    from kvtiers.core.state import CacheState
    from kvtiers.core.stores import Stores
    from kvtiers.core.tree import Run


# Bound once: finding a member on its enum takes longer than what is done with it (Python 3.11).
_HOST, _CAPACITY = Tier.HOST, LeaveReason.CAPACITY
_COVERED, _DEMOTED, _DROPPED = LeaveOutcome.COVERED, LeaveOutcome.DEMOTED, LeaveOutcome.DROPPED


class HostTier:
    def __init__(self, state: CacheState, stores: Stores) -> None:
        self._state = state
        self._stores = stores

    def make_room(
        self,
        pages: int,
        for_victim: Run | None = None,
        before: Run | None = None,
        spare: Collection[Run] = (),
    ) -> None:
        """Try to have `pages` free host slots; `state.host.free` says how far it came.

        For a page that comes down from the device as a victim only what is older goes (its own
        host-only descendants among it): a victim must not push out what outlives it. With
        `before`, only what is older than that run; nothing of the runs in `spare` goes.
        """
        missing = pages - self._state.host.free
        if missing > 0:
            self.evict(missing, for_victim, before, spare)

    def evict(
        self,
        pages: int,
        for_victim: Run | None = None,
        before: Run | None = None,
        spare: Collection[Run] = (),
    ) -> int:
        """Free up to `pages` host slots now; returns how many became free."""
        state = self._state
        order = state.host_order
        left = pages
        covered = demoted = dropped = 0
        limit = before or for_victim
        if order.mirrors_first:
            covered = self._give_up_mirrors(left, spare, for_victim)
            left -= covered
        elif limit is None and not spare and not self._stores_on_evict():
            demoted, dropped = self._evict_plain(left)
            left -= demoted + dropped
        for run in victims(order, held_on_host) if left else ():
            if limit is not None and order.outlives(run, limit):
                break
            if run in spare:
                continue
            start, end, device = run.host_start, run.host_end, run.device_pages
            keep = max(start, end - left)
            if order.mirrors_first or for_victim is not None:
                # Sole copies only: a mirror of what is older than the victim is there for its own
                # way down, and two victims would take each other's for ever.
                keep = max(keep, device)
                if keep >= end:
                    continue
            sole = end - max(keep, device)  # pages that are on host only
            if sole > 0:
                if run.children:
                    continue  # those below would be lost with it; they come first or are held
                if self._must_store_first(run, max(keep, device)):
                    continue
                stored = max(0, min(run.stored_pages, end) - max(keep, device))
                demoted += stored
                dropped += sole - stored
                state.forget_pages(run, max(keep, device), Tier.HOST, LeaveReason.CAPACITY)
            covered += end - keep - max(sole, 0)
            left -= end - keep
            self._cut_tail(run, keep)
            if not left:
                break
        if covered:
            state.book_left(_HOST, _COVERED, _CAPACITY, covered)
        if demoted:
            state.book_left(_HOST, _DEMOTED, _CAPACITY, demoted)
        state.book_left(_HOST, _DROPPED, _CAPACITY, dropped)
        return pages - left

    def _evict_plain(self, pages: int) -> tuple[int, int]:
        """Free the oldest runs as long as each is a leaf that only host has and nothing holds.

        Returns how many pages were demoted and dropped. Nearly every eviction ends in here, and
        the loop in `evict` would do the same in three times as long.
        """
        state = self._state
        order, tree, slots_of_host = state.host_order, state.tree, state.host
        remembers = state.ghosts.capacity > 0
        left = pages
        demoted = 0
        while left:
            run = order.oldest()
            if (
                run is None
                or run.device_pages
                or run.children
                or run.backup is not None
                or run.store is not None
            ):
                break
            end, slots = run.host_end, run.host_slots  # it begins at 0: there is no page above it
            keep = end - left if end > left else 0
            left -= end - keep
            stored = run.stored_pages - keep
            if stored > 0:
                demoted += stored
            if remembers:
                state.forget_pages(run, keep, _HOST, _CAPACITY)
            if keep:
                slots_of_host.give(slots[keep:])
                run.host_slots = slots[:keep]
                run.host_end = keep
                tree.trim(run)
            else:
                slots_of_host.give(slots)
                order.discard(run)
                run.pages = run.host_end = 0
                run.host_slots = NO_SLOTS
                tree.unlink(run)
        freed = pages - left
        if freed:
            state.host_evictable -= freed
            tree.epoch += 1
        return demoted, freed - demoted

    def flush(self) -> int:
        """Remove every page of the host tier that is neither leased nor held."""
        state = self._state
        removed = 0
        for run in [*state.host_order, *state.host_order.mirrors()]:
            if run not in state.host_order or held_on_host(run):
                continue
            if run.host_end > run.device_pages:
                if run.children:
                    continue  # a child below is held by a copy
                state.forget_pages(run, run.device_pages, Tier.HOST, LeaveReason.COMMAND)
            removed += run.host_end - run.host_start
            self._cut_tail(run, run.host_start)
        state.book_left(Tier.HOST, LeaveOutcome.REMOVED, LeaveReason.COMMAND, removed)
        return removed

    def drop_below(self, run: Run, outcome: LeaveOutcome, reason: LeaveReason) -> None:
        """Free everything below `run`, all of it on host only, because `run` is losing pages.

        The caller has made sure with `held_below` that no copy uses any of it.
        """
        state = self._state
        dropped = 0
        below = list(run.children.values())
        for each in below:
            below.extend(each.children.values())
        for each in reversed(below):
            assert not each.device_pages
            assert not each.locks
            dropped += each.host_end - each.host_start
            state.forget_pages(each, 0, Tier.HOST, reason)
            self._cut_tail(each, each.host_start)
        state.book_left(Tier.HOST, outcome, reason, dropped)

    def drop_tail(self, run: Run, keep: int, outcome: LeaveOutcome, reason: LeaveReason) -> None:
        """Free the run's own host pages from `keep` on, because device loses `[keep, ...)`.

        `forget_pages` has been told. Leaves the trimming of the run to the caller, who is about to
        take its device pages too.
        """
        if run.host_end <= keep:
            return
        gone = self._free_tail(run, max(run.host_start, keep))
        self._state.book_left(Tier.HOST, outcome, reason, gone)

    def held_below(self, run: Run) -> bool:
        """Whether a page below `run` is on device still, or used by a copy in flight."""
        below = list(run.children.values())
        for each in below:
            if each.device_pages or each.locks or held_on_host(each):
                return True
            below.extend(each.children.values())
        return False

    def _give_up_mirrors(self, pages: int, spare: Collection[Run], for_victim: Run | None) -> int:
        """Exclusive retention: pages that are on device too leave first, head first.

        For a victim only mirrors of what stays on device longer than it: those of older runs were
        made for their own way down, and two victims would take each other's for ever.
        """
        state = self._state
        order = state.host_order
        age = state.device_order.age
        oldest = None if for_victim is None else age(for_victim)

        def free_to_go() -> Iterator[Run]:
            for run in order.mirrors():  # the youngest first
                if oldest is not None and age(run) <= oldest:
                    return
                if not held_on_host(run) and run not in spare:
                    yield run

        left = pages
        while left:
            batch = list(islice(free_to_go(), 64))
            for run in batch:
                take = min(run.device_pages, run.host_end, run.host_start + left) - run.host_start
                state.host.give(run.host_slots[:take])
                state.host_evictable -= take
                run.host_slots = run.host_slots[take:]
                run.host_start += take
                if run.host_start == run.host_end:
                    run.host_start = run.host_end = 0
                order.update(run)
                state.tree.epoch += 1
                left -= take
                if not left:
                    break
            if not batch:
                break
        return pages - left

    def _stores_on_evict(self) -> bool:
        state = self._state
        return state.storage_attached and state.config.store_on is StoreOn.EVICT

    def _must_store_first(self, run: Run, first: int) -> bool:
        """Under store_on=evict: order the store of pages that would be lost; True: wait for it."""
        if not self._stores_on_evict():
            return False
        if run.stored_pages >= run.host_end or run.store_failed:
            return False
        self._stores.order(run)
        return run.store is not None

    def _cut_tail(self, run: Run, keep: int) -> None:
        """The unlocked run's host pages `[keep, host_end)` leave; empty what is left empty."""
        state = self._state
        self._free_tail(run, keep)
        state.tree.epoch += 1
        state.host_order.update(run)
        state.tree.trim(run)

    def _free_tail(self, run: Run, keep: int) -> int:
        state = self._state
        start = run.host_start
        gone = run.host_slots[keep - start :]
        state.host.give(gone)
        state.host_evictable -= len(gone)
        run.host_slots = run.host_slots[: keep - start]
        run.host_end = keep
        if keep == start:
            run.host_start = run.host_end = 0
        return len(gone)
