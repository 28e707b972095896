"""The device tier gives up pages: exactly as many as asked, oldest run first, tail first.

What a page leaves behind decides how it leaves:

    it is on host                       demoted: its slot is free at once
    the policy saves it, host has room  a backup is ordered; the run keeps its place as the oldest,
                                        and its slot comes free at the call after the ack
    otherwise                           dropped, together with what only host holds below it

This file decides who goes and books how; copies are ordered through `Copies`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvtiers.core.tree import NO_SLOTS
from kvtiers.core.victims import held_on_device, victims
from kvtiers.types import LeaveOutcome, LeaveReason, Tier, WritePolicy

if TYPE_CHECKING:
    from kvtiers.core.copies import Copies
    from kvtiers.core.host_tier import HostTier
    from kvtiers.core.state import CacheState
    from kvtiers.core.tree import Run


# Bound once: finding a member on its enum takes longer than what is done with it (Python 3.11).
_DEVICE = Tier.DEVICE
_DEMOTED, _DROPPED, _CAPACITY = LeaveOutcome.DEMOTED, LeaveOutcome.DROPPED, LeaveReason.CAPACITY


class Freed(NamedTuple):
    """Device pages that are free now, and that copies in flight will set free."""

    now: int
    pending: int
    stops: bool = False
    """The rest of a run must wait for its copies: nothing that is younger may go before it."""


class DeviceTier:
    def __init__(self, state: CacheState, host: HostTier, copies: Copies) -> None:
        self._state = state
        self._host = host
        self._copies = copies
        self._demoted = 0
        self._dropped: dict[LeaveReason, int] = {}

    def evict(self, pages: int) -> Freed:
        """Free up to `pages` device slots, as far as copies need not be waited for."""
        state = self._state
        left = pages - self._evict_plain(pages)
        if not left:
            self._book()
            return Freed(pages, 0)
        pending = 0
        for run in victims(state.device_order, held_on_device):
            if pending and _has_child_on_device(run):
                freed = self._prepare(run, left)
            else:
                freed = self._take(run, left)
            left -= freed.now + freed.pending
            pending += freed.pending
            if not left or freed.stops:
                break
        self._book()
        return Freed(pages - left - pending, pending)

    def _evict_plain(self, pages: int) -> int:
        """Free the oldest runs as long as there is nothing to decide about them; returns how many.

        That is: as long as each is wholly on host or there is no host. Nearly every eviction ends
        in here, and the loop in `evict` would do the same in four times as long.
        """
        state = self._state
        order, tree, has_host = state.device_order, state.tree, state.has_host
        device_slots = state.device
        mirrors_first = state.host_order.mirrors_first
        remembers = not has_host and state.ghosts.capacity > 0
        left = pages
        while left:
            run = order.oldest()
            if run is None or run.backup is not None:
                break
            device = run.device_pages
            if has_host and (run.host_start or run.host_end < device):
                break
            keep = device - left if device > left else 0
            left -= device - keep
            if remembers:
                state.forget_pages(run, keep, _DEVICE, _CAPACITY)
            slots = run.device_slots
            run.device_pages = keep
            if keep:
                device_slots.give(slots[keep:])
                run.device_slots = slots[:keep]
                if not has_host:
                    tree.trim(run)
            else:
                device_slots.give(slots)
                run.device_slots = NO_SLOTS
                order.discard(run)
                if not has_host:
                    run.pages = 0
                    tree.unlink(run)
            if mirrors_first:
                state.host_order.update(run)
        freed = pages - left
        state.device_evictable -= freed
        tree.epoch += 1
        if has_host:
            self._demoted += freed
        elif freed:
            self._dropped[_CAPACITY] = freed
        return freed

    def _take(self, run: Run, left: int) -> Freed:
        """Up to `left` pages of the run's tail go: now, or when a copy ordered now has ended."""
        now = 0
        while now < left and run.device_pages:
            demoted = self._demote(run, left - now)
            freed = Freed(demoted, 0) if demoted else self._save_or_drop(run, left - now)
            now += freed.now
            if freed.pending:
                return Freed(now, freed.pending)
        return Freed(now, 0)

    def _prepare(self, run: Run, left: int) -> Freed:
        """The same where a copy ordered just now still reads pages below: nothing goes at once."""
        device = run.device_pages
        if run.host_start < device <= run.host_end:  # its tail is on host
            mirrored = device - run.host_start
            return Freed(0, min(left, mirrored), stops=run.host_start > 0)
        taken = min(left, device)
        self._save_or_drop(run, taken)
        return Freed(0, taken)

    def flush(self) -> int:
        """Remove every device page that is neither leased nor held; what is on host stays there."""
        state = self._state
        removed = 0
        for run in victims(state.device_order, held_on_device):
            wholly_on_host = run.host_start == 0 and run.host_end >= run.device_pages
            if _has_child_on_device(run) or (not wholly_on_host and self._is_in_use(run, 0)):
                continue  # what is below stays, or this one itself
            removed += run.device_pages
            if not wholly_on_host:
                keep = run.host_end if run.host_start == 0 else 0
                self._lose(run, keep, LeaveOutcome.REMOVED, LeaveReason.COMMAND)
            if run.device_pages:
                self._release(run, 0)
        state.book_left(Tier.DEVICE, LeaveOutcome.REMOVED, LeaveReason.COMMAND, removed)
        return removed

    def _demote(self, run: Run, left: int) -> int:
        """Free the part of the run's tail that is on host too; returns how many pages."""
        device = run.device_pages
        if run.host_end < device or run.host_start >= device:
            return 0
        keep = max(device - left, run.host_start)
        self._release(run, keep)
        self._demoted += device - keep
        return device - keep

    def _save_or_drop(self, run: Run, left: int) -> Freed:
        """The last `left` pages of the run's tail, not on host, shall go: copy or lose them.

            pages    0      keep   first      cut         end
                     |------|------|----save----|---drop----|

        Of `[keep, end)` host may have `[keep, first)`. What host has no room for is lost from the
        deep end. Where host has pages above `keep` only, those become a run of their own, so that
        the host part of each run stays one interval.
        """
        if run.host_start < run.host_end < run.device_pages - left:
            self._state.divide(run, run.host_end)
        end = run.device_pages
        keep = max(end - left, 0)
        has_host_below = run.host_start < run.host_end < end
        first = cut = run.host_end if has_host_below else keep
        reason = self._why_lost(run)
        waits = False
        if reason is None:
            room = self._copies.backup_room()
            if room <= 0:
                return Freed(0, end - keep)  # copies in flight make room first
            on_its_way = self._copies.oldest_victim(before=run)
            self._host.make_room(end - first, for_victim=run, before=on_its_way)
            cut += min(end - first, self._state.host.free, room)
            reason = _REASON_WITHOUT_ROOM[self._state.config.write_policy]
            waits = on_its_way is not None  # it will give way to this one
        if cut < end and not waits:
            waits = self._is_in_use(run, cut)
        if cut < end and not waits:
            self._lose_device_pages(run, cut, reason)
        adjoins = cut == run.device_pages or run.host_end <= first  # host's part stays one interval
        saved = cut - first if adjoins else 0
        if saved:
            self._copies.save(run, first, cut)
        if waits:
            return Freed(0, end - keep)
        return Freed(end - cut, cut - keep if saved else 0)

    def _is_in_use(self, run: Run, page: int) -> bool:
        """Whether host pages of the run from `page` on, or anything below, are in use."""
        being_stored = run.store is not None and run.host_end > page
        return being_stored or self._host.held_below(run)

    def _why_lost(self, run: Run) -> LeaveReason | None:
        """Why an unsaved page of the run will not be saved; None: the policy saves it."""
        config = self._state.config
        if not self._state.has_host:
            return LeaveReason.CAPACITY
        if run.copy_failed:
            return LeaveReason.COPY_FAILED
        if config.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE and run.uses < 2:
            return LeaveReason.SELECTIVE_COLD
        return None

    def _lose_device_pages(self, run: Run, keep: int, reason: LeaveReason) -> None:
        device = run.device_pages
        stored = max(0, min(run.stored_pages, device) - keep)
        self._demoted += stored  # storage still has them
        self._dropped[reason] = self._dropped.get(reason, 0) + device - keep - stored
        self._lose(run, keep, LeaveOutcome.DROPPED, reason)

    def _lose(self, run: Run, keep: int, outcome: LeaveOutcome, reason: LeaveReason) -> None:
        """Pages `[keep, device_pages)` leave their last tier, and all below them with them."""
        state = self._state
        if run.children:
            self._host.drop_below(run, outcome, reason)
        state.forget_pages(run, keep, Tier.DEVICE, reason)
        self._host.drop_tail(run, keep, outcome, reason)
        self._release(run, keep)

    def _release(self, run: Run, keep: int) -> None:
        """Give back the slots of pages `[keep, device_pages)` of an unlocked run."""
        state = self._state
        gone = run.device_slots[keep:]
        state.device.give(gone)
        state.device_evictable -= len(gone)
        run.device_pages = keep
        run.device_slots = run.device_slots[:keep]
        if not keep:
            state.device_order.discard(run)
        if state.has_host:
            state.host_order.update(run)
        state.tree.epoch += 1
        state.tree.trim(run)

    def _book(self) -> None:
        state = self._state
        state.book_left(_DEVICE, _DEMOTED, _CAPACITY, self._demoted)
        self._demoted = 0
        if self._dropped:
            for reason, pages in self._dropped.items():
                state.book_left(_DEVICE, _DROPPED, reason, pages)
            self._dropped.clear()


def _has_child_on_device(run: Run) -> bool:
    return any(child.device_pages for child in run.children.values())


_REASON_WITHOUT_ROOM = {
    WritePolicy.WRITE_BACK: LeaveReason.HOST_PRESSURE,
    WritePolicy.WRITE_THROUGH: LeaveReason.WRITE_THROUGH_UNBACKED_EVICTION,
    WritePolicy.WRITE_THROUGH_SELECTIVE: LeaveReason.WRITE_THROUGH_UNBACKED_EVICTION,
}
