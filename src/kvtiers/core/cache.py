"""`UnifiedRadixCache`: one radix cache over three tiers. Decides; never copies, waits or counts.

This file is the surface and the wiring. What it is made of, in the order to read it:

    tree, slots, policies/, retention      the structure and its orders
    state                                  what the parts share; locks
    matching, admission, publication       the life of a request: match, admit, commit, finish
    device_tier, host_tier, victims        who leaves a tier, and with what outcome
    operations, copies, stores, prefetch   ordering copies, and applying how they ended
    hits, ghosts, misses                   where a prompt came from, and why the rest did not
    pins, cleaner, audit                   commands, working ahead, counting afresh

It knows nothing of tensors, clocks, threads, files, randomness or logs: the same calls give the
same facts in another process or next year (`testing.replay` checks it).
"""

from __future__ import annotations

from kvtiers.core.admission import Admission
from kvtiers.core.audit import recount
from kvtiers.core.cleaner import Cleaner
from kvtiers.core.copies import Copies
from kvtiers.core.device_tier import DeviceTier
from kvtiers.core.host_tier import HostTier
from kvtiers.core.interface import Blocked, MatchLengths, Refused
from kvtiers.core.lease import Lease
from kvtiers.core.matching import Matcher, require_tokens
from kvtiers.core.misses import Misses
from kvtiers.core.operations import Operation
from kvtiers.core.pins import Pins
from kvtiers.core.prefetch import Prefetcher
from kvtiers.core.publication import Publication
from kvtiers.core.state import CacheState
from kvtiers.core.stores import Stores
from kvtiers.errors import ConfigError, ProtocolError, UnknownOperation
from kvtiers.events import Fact, FactTuple, HiCacheAck, WorkOrder
from kvtiers.types import (
    TOKEN_BYTES,
    Attempt,
    CacheConfig,
    EndedBy,
    FailReason,
    Namespace,
    Purpose,
    SlotState,
    Tier,
)

# Bound once: finding a member on its enum takes longer than what is done with it (Python 3.11).
_FINISHED = EndedBy.FINISHED
_STORE, _PREFETCH = Purpose.STORE, Purpose.PREFETCH


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
        self._pins = Pins(state)
        self._cleaner = Cleaner(state, self._copies)
        self._matcher = Matcher(state)
        self._admission = Admission(
            state,
            self._matcher,
            self._device,
            self._copies,
            self._prefetcher,
            Misses(state, self._prefetcher),
        )
        self._publication = Publication(state, self._copies)

    # ---- looking

    def match(self, key: bytes, namespace: Namespace) -> MatchLengths:
        root = self._tree.roots.get(namespace.digest)
        if root is None:
            return MatchLengths(0, 0, 0)
        match = self._matcher.match(root, key)
        raw, device = match.pages, match.device_pages
        limit = self._matcher.usable_limit(len(key) // TOKEN_BYTES)
        usable = raw if raw < limit else limit
        return MatchLengths(device if device < usable else usable, usable, raw)

    # ---- before admission

    def prefetch(self, request_id: int, key: bytes, namespace: Namespace, now: float) -> int | None:
        require_tokens(key)
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
        return self._admission.admit(
            request_id, key, namespace, now, reserve_tokens, ticket_id, attempt
        )

    def extend(self, lease: Lease, tokens: int, now: float) -> bool:
        return self._admission.extend(lease, tokens)

    def fork(self, lease: Lease, request_id: int, now: float) -> Lease | Blocked:
        return self._admission.fork(lease, request_id)

    # ---- results

    def commit(self, lease: Lease, key: bytes, computed_tokens: int, now: float) -> None:
        self._publication.commit(lease, key, computed_tokens)

    def finish(self, lease: Lease, now: float) -> None:
        self._publication.end(lease, _FINISHED)

    def retract(self, lease: Lease, now: float) -> None:
        self._publication.end(lease, EndedBy.RETRACTED)

    def abort(self, lease: Lease, now: float) -> None:
        self._publication.end(lease, EndedBy.VOIDED if lease.voided else EndedBy.ABORTED)

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
        if purpose is _STORE:
            self._stores.apply(operation)
        elif purpose is _PREFETCH:
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
        own = _own_tier(tier)
        self.state.ghosts.clear()
        if own is Tier.DEVICE:
            return self._device.flush()
        return self._host.flush()

    def pin(self, key: bytes, namespace: Namespace, now: float, ttl_seconds: float) -> int | None:
        require_tokens(key)
        root = self._tree.roots.get(namespace.digest)
        if root is None:
            return None
        match = self._matcher.match(root, key)
        if not match.pages:
            return None
        run = self._admission.lock_path(match.run, match.pages_in_run, match.pages)
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
        return recount(self.state)

    @property
    def leases(self) -> dict[int, Lease]:
        """The live leases by id."""
        return self.state.leases


def _own_tier(tier: Tier) -> Tier:
    if tier is Tier.STORAGE:
        raise ProtocolError(
            "storage keeps its own pages; clear it through the store, not through the cache"
        )
    return tier
