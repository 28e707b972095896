"""Admission: one attempt gets everything it needs, or holds nothing.

The look-up that counts is the match made in here. The order is: match, lock the own path, decide
what is loaded back, make room (which evicts others, never the own path), split the hits, take the
slots, order the load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtiers.core.hits import split_cached_prefix_by_tier
from kvtiers.core.interface import Blocked, Refused
from kvtiers.core.lease import Lease
from kvtiers.core.matching import Matcher, require_tokens
from kvtiers.errors import ProtocolError
from kvtiers.events import Fact
from kvtiers.types import (
    TOKEN_BYTES,
    Attempt,
    BlockedOn,
    DeclineReason,
    HitSplit,
    Missed,
    MissReason,
    Namespace,
    Purpose,
    UnfulfilledReason,
    WritePolicy,
)

if TYPE_CHECKING:
    from kvtiers.core.copies import Copies
    from kvtiers.core.device_tier import DeviceTier
    from kvtiers.core.misses import Misses
    from kvtiers.core.operations import Operation
    from kvtiers.core.prefetch import Prefetcher, Ticket
    from kvtiers.core.state import CacheState
    from kvtiers.core.tree import Run


# Bound once: finding a member on its enum takes longer than what is done with it (Python 3.11).
_ADMITTED, _FIRST = Fact.ADMITTED, Attempt.FIRST


class Admission:
    def __init__(
        self,
        state: CacheState,
        matcher: Matcher,
        device: DeviceTier,
        copies: Copies,
        prefetcher: Prefetcher,
        misses: Misses,
    ) -> None:
        self._state = state
        self._config = state.config
        self._tree = state.tree
        self._matcher = matcher
        self._device = device
        self._copies = copies
        self._prefetcher = prefetcher
        self._misses = misses

    def admit(
        self,
        request_id: int,
        key: bytes,
        namespace: Namespace,
        now: float,
        reserve_tokens: int,
        ticket_id: int | None,
        attempt: Attempt,
    ) -> Lease | Blocked | Refused:
        """See `PrefixCache.admit`."""
        require_tokens(key)
        if reserve_tokens < 0:
            raise ProtocolError(f"reserve_tokens is {reserve_tokens}; it cannot be negative")
        state = self._state
        page_tokens = self._config.page_tokens
        prompt_tokens = len(key) // TOKEN_BYTES
        total = -(-(prompt_tokens + reserve_tokens) // page_tokens)
        if total > state.device.capacity:
            state.facts.append((Fact.REFUSED, request_id, total, state.device.capacity))
            return Refused(total, state.device.capacity)
        ticket = None
        if ticket_id is not None:
            ticket = self._prefetcher.get(ticket_id)
            if not self._prefetcher.ready(ticket, now):
                return self._blocked(request_id, BlockedOn.PREFETCH, prompt_tokens)

        root = self._tree.root(namespace)
        match = self._matcher.match(root, key)
        raw = match.pages
        run, device = match.run, match.device_pages
        limit = self._matcher.usable_limit(prompt_tokens)
        again: MissReason | None = None  # why host pages of the match are computed again
        path_end = raw
        if device < raw and raw > limit:
            # The last page would be loaded only to be computed again: leave it where it is.
            path_end = max(limit, device)
        if self._copies.failed_loads and path_end > device:
            failed_at = self._copies.failed_loads.get(request_id)
            if failed_at is not None and failed_at < path_end:
                path_end = max(failed_at, device)
                again = MissReason.LOAD_FAILED
        run = self.lock_path(run, match.pages_in_run, path_end)

        joined_end = device
        if device < path_end:
            loading = self._loading_until(run, device)
            if loading is None:
                state.unlock(run)
                return self._blocked(request_id, BlockedOn.LOADING, prompt_tokens)
            joined_end = loading
            why_not = self._why_not_load(path_end - joined_end)
            if why_not is not None:
                state.facts.append(
                    (Fact.DECLINED, Purpose.LOAD_BACK, why_not, path_end - joined_end)
                )
                again = MissReason.LOAD_DECLINED
                path_end = joined_end
                shorter = self.lock_path(run, run.pages, path_end)
                state.unlock(run)
                run = shorter
        to_load = path_end - joined_end
        need = total - path_end + to_load
        free = state.device.free
        if need > free:
            on = self._make_device_room(need)
            if on is not None:
                state.unlock(run)
                self._tree.drop_empty_root(root)
                return self._blocked(request_id, on, prompt_tokens)

        usable = min(path_end, limit)
        split = self._split(key, run, usable, device, path_end, raw, again, ticket, now)
        slots = state.device.take(need)
        lease = Lease(
            state.next_id(),
            request_id,
            attempt,
            run,
            namespace,
            page_tokens,
            prompt_tokens,
            split,
            path_end,
            slots[to_load:] if to_load else slots,
        )
        self._state.leases[lease.lease_id] = lease
        joined = joined_end - device
        state.facts.append(
            (
                _ADMITTED,
                lease.lease_id,
                attempt,
                prompt_tokens,
                joined * page_tokens,
                need - to_load,
            )
        )
        if joined:
            self._join_loads(lease, run, device)
        if to_load:
            self._copies.load_back(lease, run, joined_end, slots[:to_load])
        if state.counts_uses and attempt is _FIRST:
            self._count_use(run)
        return lease

    def lock_path(self, run: Run, pages_in_run: int, end: int) -> Run:
        """Lock the path to page `end`, which lies in `run` or above it; returns its last run."""
        while run.parent is not None and run.start >= end:
            run = run.parent
            pages_in_run = run.pages
        cut = end - run.start
        if cut > pages_in_run:
            cut = pages_in_run
        if cut < run.pages:
            run = self._state.split(run, cut)
        self._state.lock(run)
        return run

    def _loading_until(self, run: Run, device: int) -> int | None:
        """End of the pages past `device` that copies in flight are bringing; the rest is host-only.

        None: pages below are being loaded although some above them are not (the load of those has
        failed), so nobody can join or load before that copy's acknowledgement.
        """
        end = run.end
        below_is_loading = False
        while run.end > device:
            if run.load is None:
                if below_is_loading:
                    return None
                end = run.start + run.device_pages
            else:
                below_is_loading = True
            run = run.parent
        return max(end, device)

    def _why_not_load(self, pages: int) -> DeclineReason | None:
        if not pages:
            return None
        config = self._config
        tokens = pages * config.page_tokens
        if tokens < config.load_back_threshold_tokens:
            return DeclineReason.BELOW_THRESHOLD
        if config.copy_costs.copying_loses(pages, tokens):
            return DeclineReason.BREAK_EVEN
        return None

    def _make_device_room(self, need: int) -> BlockedOn | None:
        """Have `need` free device slots; otherwise what the attempt must wait for."""
        state = self._state
        missing = need - state.device.free
        if missing > state.device_evictable:
            return BlockedOn.DEVICE_CAPACITY
        freed = self._device.evict(missing)
        if need <= state.device.free:
            return None
        return (
            BlockedOn.EVICTION if freed.pending or state.operations else (BlockedOn.DEVICE_CAPACITY)
        )

    def _blocked(self, request_id: int, on: BlockedOn, tokens: int) -> Blocked:
        self._state.facts.append((Fact.BLOCKED, request_id, on, tokens))
        return Blocked(on)

    def _join_loads(self, lease: Lease, run: Run, device: int) -> None:
        joined: list[Operation] = []
        while run.end > device:
            if run.load is not None and run.load not in joined:
                joined.append(run.load)
            run = run.parent
        for operation in reversed(joined):
            operation.waiters.append(lease)
            lease.loads.append(operation)

    def _count_use(self, run: Run) -> None:
        """A distinct request uses the whole path; what it is the second to use may be backed up."""
        each = run
        while each.parent is not None:
            each.uses += 1
            each = each.parent
        if self._config.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            self._copies.back_up_path(run)

    def _split(
        self,
        key: bytes,
        run: Run,
        usable: int,
        device: int,
        path_end: int,
        raw: int,
        again: MissReason | None,
        ticket: Ticket | None,
        now: float,
    ) -> HitSplit:
        page_tokens = self._config.page_tokens
        prefix = usable * page_tokens
        from_host = (usable - device) * page_tokens if usable > device else 0
        computed = len(key) // TOKEN_BYTES - prefix
        missed = self._misses.explain(key, run, usable, path_end, raw, again, ticket, now)
        if ticket is None:
            return HitSplit(prefix - from_host, from_host, 0, computed, missed)
        hits = split_cached_prefix_by_tier(
            prefix,
            from_host,
            ticket.arrived_pages * page_tokens,
            ticket.first_page * page_tokens,
        )
        self._prefetcher.close(
            ticket,
            hits.storage,
            UnfulfilledReason.DEVICE_CAPACITY
            if again is not None
            else UnfulfilledReason.CACHE_ADMISSION_SHORTFALL,
        )
        return HitSplit(*hits, computed, missed)

    def extend(self, lease: Lease, tokens: int) -> bool:
        lease.require_live()
        state = self._state
        more = -(-tokens // self._config.page_tokens) - lease.own_from - len(lease.own_slots)
        if more <= 0:
            return True
        if more > state.device.free and self._make_device_room(more) is not None:
            return False
        lease.own_slots = np.concatenate((lease.own_slots, state.device.take(more)))
        state.facts.append((Fact.EXTENDED, lease.lease_id, more))
        return True

    def fork(self, lease: Lease, request_id: int) -> Lease | Blocked:
        lease.require_live()
        if not lease.booked:
            raise ProtocolError(
                f"lease {lease.lease_id} has no result yet; fork it after its first commit"
            )
        state = self._state
        page_tokens = self._config.page_tokens
        published = min(lease.published_pages, self._matcher.usable_limit(lease.prompt_tokens))
        total = lease.own_from + len(lease.own_slots)
        run = self.lock_path(lease.run, lease.run.pages, published)
        need = total - published
        if need > state.device.free:
            on = self._make_device_room(need)
            if on is not None:
                state.unlock(run)
                return self._blocked(request_id, on, lease.prompt_tokens)
        prefix = published * page_tokens
        split = HitSplit(
            prefix, 0, 0, lease.prompt_tokens - prefix, self._fork_misses(lease, published)
        )
        fork = Lease(
            state.next_id(),
            request_id,
            Attempt.FORK,
            run,
            lease.namespace,
            page_tokens,
            lease.prompt_tokens,
            split,
            published,
            state.device.take(need),
        )
        self._state.leases[fork.lease_id] = fork
        state.facts.append(
            (Fact.ADMITTED, fork.lease_id, Attempt.FORK, fork.prompt_tokens, 0, need)
        )
        return fork

    def _fork_misses(self, lease: Lease, published: int) -> tuple[Missed, ...]:
        """Why a fork computes what lies past page `published`; the reasons sum to it.

        A whole page is unpublished only where somebody is loading it (see `publication`).
        """
        page_tokens = self._config.page_tokens
        usable = self._matcher.usable_limit(lease.prompt_tokens)
        whole, tail = divmod(lease.prompt_tokens, page_tokens)
        reasons = (
            (MissReason.IN_FLIGHT, (usable - published) * page_tokens),
            (MissReason.LAST_TOKEN, (whole - usable) * page_tokens),
            (MissReason.SUB_PAGE_TAIL, tail),
        )
        return tuple([Missed(reason, tokens) for reason, tokens in reasons if tokens])
