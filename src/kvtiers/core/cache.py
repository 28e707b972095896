"""`UnifiedRadixCache`: one radix cache over three tiers. Decides; never copies, waits or counts.

This file is the life of a request: match, admit, commit, finish. What it stands on:

    tree, slots, policies/, retention    the structure and its orders
    state                                what the parts share; locks
    device_tier, host_tier               who leaves a tier, and with what outcome
    copies, stores, prefetch             ordering copies and applying their acknowledgements
    hits, ghosts, misses                 where a prompt came from, and why the rest did not

It knows nothing of tensors, clocks, threads, files, randomness or logs: the same calls give the
same facts in another process or next year (`testing.replay` checks it).
"""

from __future__ import annotations

import numpy as np

from kvtiers.core.audit import Occupancy, occupancy, recount
from kvtiers.core.cleaner import Cleaner
from kvtiers.core.copies import Copies
from kvtiers.core.device_tier import DeviceTier
from kvtiers.core.hits import split_cached_prefix_by_tier
from kvtiers.core.host_tier import HostTier
from kvtiers.core.interface import Blocked, MatchLengths, Refused
from kvtiers.core.lease import Lease
from kvtiers.core.misses import Misses
from kvtiers.core.operations import Operation
from kvtiers.core.pins import Pins
from kvtiers.core.prefetch import Prefetcher, Ticket
from kvtiers.core.state import CacheState
from kvtiers.core.stores import Stores
from kvtiers.core.tree import Match, Run
from kvtiers.errors import ConfigError, InvalidTokens, ProtocolError, UnknownOperation
from kvtiers.events import Fact, FactTuple, HiCacheAck, WorkOrder
from kvtiers.types import (
    TOKEN_BYTES,
    Attempt,
    BlockedOn,
    CacheConfig,
    DeclineReason,
    EndedBy,
    FailReason,
    HitSplit,
    Namespace,
    Purpose,
    SlotState,
    Tier,
    UnfulfilledReason,
    WritePolicy,
)


class UnifiedRadixCache:
    """The cache that serves. Its surface is `core.interface.PrefixCache`, documented there."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.state = state = CacheState(config)
        self._tree = state.tree
        self._stores = Stores(state)
        self._host = HostTier(state, self._stores)
        self._copies = Copies(state, self._host, self._stores)
        self._device = DeviceTier(state, self._host, self._copies)
        self._prefetcher = Prefetcher(state, self._host)
        self._misses = Misses(state, self._prefetcher)
        self._pins = Pins(state)
        self._cleaner = Cleaner(state, self._copies)
        self._backs_up_on_commit = state.has_host and config.write_policy is not (
            WritePolicy.WRITE_BACK
        )
        self.leases: dict[int, Lease] = {}
        self._memo: tuple[bytes, bytes, int, Match] | None = None

    # ---- looking

    def match(self, key: bytes, namespace: Namespace) -> MatchLengths:
        root = self._tree.roots.get(namespace.digest)
        if root is None:
            return MatchLengths(0, 0, 0)
        match = self._match(root, key)
        usable = min(match.pages, self._usable_limit(len(key) // TOKEN_BYTES))
        return MatchLengths(min(match.device_pages, usable), usable, match.pages)

    def _match(self, root: Run, key: bytes) -> Match:
        """The raw match; that of the last call again where nothing has changed since."""
        memo = self._memo
        if (
            memo is not None
            and memo[0] is key
            and memo[1] is root.key
            and memo[2] == self._tree.epoch
        ):
            return memo[3]
        whole = len(key) // self._tree.page_bytes * self._tree.page_bytes
        match = self._tree.match(root, key, whole)
        self._memo = (key, root.key, self._tree.epoch, match)
        return match

    def _usable_limit(self, prompt_tokens: int) -> int:
        """Pages of a prompt that may be hits: at least one token is always computed."""
        if self.config.last_token_rule:
            prompt_tokens -= 1
        return prompt_tokens // self.config.page_tokens

    # ---- before admission

    def prefetch(self, request_id: int, key: bytes, namespace: Namespace, now: float) -> int | None:
        _require_tokens(key)
        return self._prefetcher.begin(key, namespace, now)

    def found(self, ticket_id: int, pages: int, now: float) -> None:
        self._prefetcher.found(ticket_id, pages)

    def prefetch_ready(self, ticket_id: int, now: float) -> bool:
        return self._prefetcher.ready(self._prefetcher.get(ticket_id), now)

    def cancel_prefetch(self, ticket_id: int, now: float) -> None:
        self._prefetcher.cancel(self._prefetcher.get(ticket_id))

    # ---- admission

    def admit(
        self,
        request_id: int,
        key: bytes,
        namespace: Namespace,
        now: float,
        *,
        reserve_tokens: int = 0,
        ticket_id: int | None = None,
        attempt: Attempt = Attempt.FIRST,
    ) -> Lease | Blocked | Refused:
        _require_tokens(key)
        if reserve_tokens < 0:
            raise ProtocolError(f"reserve_tokens is {reserve_tokens}; it cannot be negative")
        state = self.state
        page_tokens = self.config.page_tokens
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
        match = self._match(root, key)
        raw = match.pages
        run, device = match.run, match.device_pages
        limit = self._usable_limit(prompt_tokens)
        declined = None  # why host pages of the match are computed again
        path_end = raw
        if device < raw and raw > limit:
            # The last page would be loaded only to be computed again: leave it where it is.
            path_end = max(limit, device)
        if self._copies.failed_loads and path_end > device:
            failed_at = self._copies.failed_loads.get(request_id)
            if failed_at is not None and failed_at < path_end:
                path_end = max(failed_at, device)
                declined = DeclineReason.PARENT_MISSING
        run = self._lock_path(run, match.pages_in_run, path_end)

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
                declined = why_not
                path_end = joined_end
                shorter = self._lock_path(run, run.pages, path_end)
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
        split = self._split(key, run, usable, device, path_end, raw, declined, ticket, now)
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
        self.leases[lease.lease_id] = lease
        joined = joined_end - device
        state.facts.append(
            (
                Fact.ADMITTED,
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
        if state.counts_uses and attempt is Attempt.FIRST:
            self._count_use(run)
        return lease

    def _lock_path(self, run: Run, pages_in_run: int, end: int) -> Run:
        """Lock the path to page `end`, which lies in `run` or above it; returns its last run."""
        while run.parent is not None and run.start >= end:
            run = run.parent
            pages_in_run = run.pages
        cut = min(pages_in_run, end - run.start)
        if run.parent is not None and cut < run.pages:
            run = self.state.split(run, cut)
        self.state.lock(run)
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
        config = self.config
        tokens = pages * config.page_tokens
        if tokens < config.load_back_threshold_tokens:
            return DeclineReason.BELOW_THRESHOLD
        if config.copy_costs.copying_loses(pages, tokens):
            return DeclineReason.BREAK_EVEN
        return None

    def _make_device_room(self, need: int) -> BlockedOn | None:
        """Have `need` free device slots; otherwise what the attempt must wait for."""
        state = self.state
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
        self.state.facts.append((Fact.BLOCKED, request_id, on, tokens))
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
        """A distinct request uses the whole path."""
        each = run
        while each.parent is not None:
            each.uses += 1
            each = each.parent
        if self._backs_up_on_commit and run.parent is not None:
            self._copies.back_up_path(run)

    def _split(
        self,
        key: bytes,
        run: Run,
        usable: int,
        device: int,
        path_end: int,
        raw: int,
        declined: DeclineReason | None,
        ticket: Ticket | None,
        now: float,
    ) -> HitSplit:
        page_tokens = self.config.page_tokens
        prefix = usable * page_tokens
        from_host = max(0, usable - device) * page_tokens
        if ticket is None:
            device_hit, host_hit, storage_hit = prefix - from_host, from_host, 0
        else:
            device_hit, host_hit, storage_hit = split_cached_prefix_by_tier(
                prefix,
                from_host,
                ticket.arrived_pages * page_tokens,
                ticket.first_page * page_tokens,
            )
        missed = self._misses.explain(key, run, usable, path_end, raw, declined, ticket, now)
        if ticket is not None:
            self._prefetcher.close(
                ticket,
                storage_hit,
                UnfulfilledReason.DEVICE_CAPACITY
                if declined is not None
                else UnfulfilledReason.CACHE_ADMISSION_SHORTFALL,
            )
        return HitSplit(device_hit, host_hit, storage_hit, len(key) // TOKEN_BYTES - prefix, missed)

    def extend(self, lease: Lease, tokens: int, now: float) -> bool:
        lease.require_live()
        state = self.state
        more = -(-tokens // self.config.page_tokens) - lease.own_from - len(lease.own_slots)
        if more <= 0:
            return True
        if more > state.device.free and self._make_device_room(more) is not None:
            return False
        lease.own_slots = np.concatenate((lease.own_slots, state.device.take(more)))
        state.facts.append((Fact.EXTENDED, lease.lease_id, more))
        return True

    def fork(self, lease: Lease, request_id: int, now: float) -> Lease | Blocked:
        lease.require_live()
        if not lease.booked:
            raise ProtocolError(
                f"lease {lease.lease_id} has no result yet; fork it after its first commit"
            )
        state = self.state
        page_tokens = self.config.page_tokens
        published = min(lease.published_pages, self._usable_limit(lease.prompt_tokens))
        total = lease.own_from + len(lease.own_slots)
        run = self._lock_path(lease.run, lease.run.pages, published)
        need = total - published
        if need > state.device.free:
            on = self._make_device_room(need)
            if on is not None:
                state.unlock(run)
                return self._blocked(request_id, on, lease.prompt_tokens)
        prefix = published * page_tokens
        split = HitSplit(prefix, 0, 0, lease.prompt_tokens - prefix)
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
        self.leases[fork.lease_id] = fork
        state.facts.append(
            (Fact.ADMITTED, fork.lease_id, Attempt.FORK, fork.prompt_tokens, 0, need)
        )
        return fork

    # ---- results

    def commit(self, lease: Lease, key: bytes, computed_tokens: int, now: float) -> None:
        self._require_committable(lease, key, computed_tokens)
        facts = self.state.facts
        prompt = lease.prompt_tokens
        before = lease.computed_tokens
        new_input = min(computed_tokens, prompt) - min(before, prompt)
        lease.computed_tokens = computed_tokens
        if not lease.booked:
            lease.booked = True
            facts.append((Fact.BOOKED, lease.lease_id, lease.attempt, lease.split))
        if new_input:
            facts.append((Fact.COMPUTED, lease.lease_id, lease.attempt, new_input))
        complete = computed_tokens // self.config.page_tokens
        if complete > lease.published_pages:
            self._publish(lease, key, complete)

    def _require_committable(self, lease: Lease, key: bytes, computed_tokens: int) -> None:
        lease.require_live()
        problem = None
        if lease.voided:
            problem = "a load it relied on failed; abort it and admit the request anew"
        elif lease.loads:
            problem = f"its loads {lease.load_ops} are not acknowledged yet"
        elif computed_tokens < lease.computed_tokens:
            problem = f"{lease.computed_tokens} tokens were already committed"
        elif computed_tokens > lease.capacity_tokens:
            problem = f"it has slots for {lease.capacity_tokens} tokens only; extend it first"
        elif computed_tokens * TOKEN_BYTES > len(key):
            problem = f"the key holds {len(key) // TOKEN_BYTES} tokens"
        if problem is not None:
            raise ProtocolError(
                f"cannot commit {computed_tokens} tokens of lease {lease.lease_id} "
                f"(request {lease.request_id}): {problem}"
            )

    def _publish(self, lease: Lease, key: bytes, end: int) -> None:
        """Publish pages `[published_pages, end)`. First publisher wins.

        Where the tree has a page on host only, the lease's slot becomes its device copy without a
        copy being made. Where it has it on device, the lease keeps its own slot to the end (no
        page table changes under a running kernel). A page that somebody is loading ends the walk:
        whether it will be on device is not known yet.
        """
        state = self.state
        tree = self._tree
        page_bytes = tree.page_bytes
        own_from, slots = lease.own_from, lease.own_slots
        first = page = lease.published_pages
        run = lease.run
        new = donated = 0
        while page < end:
            begin = page * page_bytes
            child = run.children.get(key[begin : begin + page_bytes])
            if child is None:
                new = end - page
                child = tree.add_child(run, key[begin : end * page_bytes], new)
                self._move_lock(run, child)
                child.device_slots = slots[page - own_from : end - own_from]
                child.device_pages = new
                child.uses = 1
                run = child
                page = end
                break
            if child.load is not None:
                break
            shared = min(tree.common_pages(child.key, key, begin), child.pages, end - page)
            if shared < child.pages:
                child = state.split(child, shared)
            self._move_lock(run, child)
            device = child.device_pages
            if device:
                lease.duplicates.append((page, page + device))
            if device < shared:
                ours = slots[page + device - own_from : page + shared - own_from]
                child.device_slots = np.concatenate((child.device_slots, ours))
                child.device_pages = shared
                donated += shared - device
                tree.epoch += 1
            if state.counts_uses and lease.attempt is Attempt.FIRST:
                child.uses += 1
            run = child
            page += shared
        if page == first:
            return
        lease.run = run
        lease.published_pages = page
        if new or donated:
            state.facts.append((Fact.PUBLISHED, lease.lease_id, new, donated))
        if self._backs_up_on_commit:
            self._copies.back_up_path(run)

    def _move_lock(self, run: Run, child: Run) -> None:
        """Hand a lease's lock from a run to its child, before the child's residency changes."""
        self.state.lock(child)
        self.state.unlock(run)

    def finish(self, lease: Lease, now: float) -> None:
        self._end(lease, EndedBy.FINISHED)

    def retract(self, lease: Lease, now: float) -> None:
        self._end(lease, EndedBy.RETRACTED)

    def abort(self, lease: Lease, now: float) -> None:
        self._end(lease, EndedBy.VOIDED if lease.voided else EndedBy.ABORTED)

    def _end(self, lease: Lease, ended_by: EndedBy) -> None:
        lease.require_live()
        whole = lease.booked and lease.computed_tokens >= lease.prompt_tokens
        if not whole and ended_by in (EndedBy.FINISHED, EndedBy.RETRACTED):
            raise ProtocolError(
                f"lease {lease.lease_id} of request {lease.request_id} has committed "
                f"{lease.computed_tokens} of {lease.prompt_tokens} prompt tokens; it can be "
                "aborted, but neither finished nor retracted"
            )
        lease.ended = True
        state = self.state
        slots = lease.own_slots
        forfeited = slots[lease.published_pages - lease.own_from :]
        if len(forfeited):
            state.device.give(forfeited)
        duplicates = 0
        for first, end in lease.duplicates:
            state.device.give(slots[first - lease.own_from : end - lease.own_from])
            duplicates += end - first
        for operation in lease.loads:
            operation.waiters.remove(lease)
        lease.loads.clear()
        state.facts.append(
            (
                Fact.ENDED,
                lease.lease_id,
                lease.attempt,
                ended_by,
                lease.prompt_tokens,
                lease.booked,
                len(forfeited),
                duplicates,
            )
        )
        del self.leases[lease.lease_id]
        if ended_by is not EndedBy.VOIDED and self._copies.failed_loads:
            self._copies.failed_loads.pop(lease.request_id, None)
        run = lease.run
        state.unlock(run)
        if run.parent is None:
            self._tree.drop_empty_root(run)
        elif not run.locks:
            self._rejoin(run)

    def _rejoin(self, lower: Run) -> None:
        """Undo splits on a path just released, so that long chats do not shred the tree.

        Two runs are one again when nothing tells them apart: the upper has no other child, both
        are wholly on device, neither is held, and they were released one right after the other.
        """
        state = self.state
        upper = lower.parent
        while (
            upper.parent is not None
            and len(upper.children) == 1
            and upper.stamp == lower.stamp + 1
            and not upper.locks
            and _alike(upper, lower, state.counts_uses)
        ):
            state.device_order.discard(upper)
            if state.has_host:
                state.host_order.discard(upper)
            stamp = upper.stamp
            self._tree.join(upper, lower)
            lower.stamp = stamp
            if state.has_host:
                state.host_order.update(lower)
            upper = lower.parent

    # ---- acknowledgements

    def ack(self, ack: HiCacheAck, now: float) -> None:
        state = self.state
        operation = state.operations.get(ack.op_id)
        if operation is None:
            raise UnknownOperation(
                f"operation {ack.op_id} was never ordered here, or has already ended"
            )
        if operation.pages_ok is not None:
            self._ack_again(operation, ack)
            return
        pages = operation.pages
        if not 0 <= ack.pages_ok <= pages:
            raise UnknownOperation(
                f"operation {ack.op_id} copies {pages} pages; {ack.pages_ok} cannot have arrived"
            )
        operation.pages_ok = ack.pages_ok
        operation.late = not ack.ended
        operation.failure = ack.failure
        if ack.pages_ok < pages and ack.failure is None:
            operation.failure = FailReason.DEADLINE if operation.late else FailReason.TRANSFER
        purpose = operation.purpose
        if purpose is Purpose.STORE:
            self._stores.apply(operation)
        elif purpose is Purpose.PREFETCH:
            self._prefetcher.apply(operation)
        else:
            self._copies.apply(purpose)

    def _ack_again(self, operation: Operation, ack: HiCacheAck) -> None:
        """A late copy has ended: its slots are nobody's again."""
        if not (operation.late and ack.ended):
            raise UnknownOperation(
                f"operation {ack.op_id} has been acknowledged already; only a late one is "
                "acknowledged again, once, with ended=True"
            )
        operation.late = False
        if not operation.applied:
            return  # it waits for an earlier one; its slots will be forfeited at once
        state = self.state
        rest = len(operation.target)
        if operation.purpose is Purpose.STORE:
            self._stores.settle(operation)
            rest = operation.pages - (operation.pages_ok or 0)
        else:
            target = operation.purpose.target
            stack = state.device if target is Tier.DEVICE else state.host
            stack.quarantined -= rest
            stack.give(operation.target)
        del state.operations[operation.op_id]
        if rest:
            state.facts.append((Fact.SETTLED, operation.op_id, operation.purpose, rest))

    # ---- commands and time

    def evict(self, tier: Tier, pages: int, now: float) -> int:
        if pages < 0:
            raise ProtocolError(f"cannot evict {pages} pages")
        if _own_tier(tier) is Tier.DEVICE:
            return self._device.evict(pages).now
        return self._host.evict(pages)

    def flush(self, tier: Tier, now: float) -> int:
        self.state.ghosts.clear()
        if _own_tier(tier) is Tier.DEVICE:
            return self._device.flush()
        return self._host.flush()

    def pin(self, key: bytes, namespace: Namespace, now: float, ttl_seconds: float) -> int | None:
        _require_tokens(key)
        root = self._tree.roots.get(namespace.digest)
        if root is None:
            return None
        match = self._match(root, key)
        if not match.pages:
            return None
        run = self._lock_path(match.run, match.pages_in_run, match.pages)
        return self._pins.add(run, match.pages * self.config.page_tokens, now + ttl_seconds)

    def unpin(self, pin_id: int, now: float) -> None:
        self._pins.remove(pin_id)

    def attach_storage(self, now: float) -> None:
        if not self.state.has_host:
            raise ConfigError("storage needs a host tier to pass through; restart with one")
        self._stores.forget()
        self.state.storage_attached = True

    def detach_storage(self, now: float) -> None:
        self.state.storage_attached = False
        self._stores.forget()

    def tick(self, now: float) -> None:
        self._pins.expire(now)
        self._cleaner.run()

    # ---- draining and looking inside

    def take_facts(self) -> list[FactTuple]:
        facts = self.state.facts
        self.state.facts = []
        return facts

    def take_orders(self) -> list[WorkOrder]:
        orders = self.state.orders
        self.state.orders = []
        return orders

    def recount(self) -> dict[tuple[Tier, SlotState], int]:
        return recount(self.state, self.leases.values())

    def occupancy(self) -> Occupancy:
        """Leased, evictable and mirrored pages, for gauges."""
        return occupancy(self.state)


def _require_tokens(key: bytes) -> None:
    if not key or len(key) % TOKEN_BYTES:
        raise InvalidTokens(
            f"a prompt is at least one int32 token ({TOKEN_BYTES} bytes each); got {len(key)} bytes"
        )


def _own_tier(tier: Tier) -> Tier:
    if tier is Tier.STORAGE:
        raise ProtocolError(
            "storage keeps its own pages; clear it through the store, not through the cache"
        )
    return tier


def _alike(upper: Run, lower: Run, counts_uses: bool) -> bool:
    """Whether two runs, one above the other, have the same state and could be one."""
    if upper.device_pages < upper.pages or lower.device_pages < lower.pages:
        return False
    if upper.backup or upper.store or lower.backup or lower.store or lower.load:
        return False
    if upper.copy_failed != lower.copy_failed or upper.store_failed != lower.store_failed:
        return False
    if counts_uses and upper.uses != lower.uses:
        return False
    if upper.stored_pages < upper.pages and lower.stored_pages:
        return False
    both_on_host = upper.host_end > upper.host_start and lower.host_end > lower.host_start
    return not both_on_host or (upper.host_end == upper.pages and lower.host_start == 0)
