"""A cache with its ledger and everything in flight, checked after every call.

Owns the orders that a test has not answered yet, and answers them as the test says. It knows a
cache by `PrefixCache` alone, so the same test drives every implementation; where one has a
structure that can be walked (`UnifiedRadixCache`), that is walked too.

After every call, whatever it was:

    every identity of the ledger holds
    the ledger's slot states equal the cache's own recount
    every slot is in one place
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

from kvtiers.core.audit import check_structure
from kvtiers.core.cache import UnifiedRadixCache
from kvtiers.core.interface import Blocked, LeaseView, PrefixCache, Refused
from kvtiers.errors import InvariantViolation
from kvtiers.events import Copy, Fact, FactTuple, HiCacheAck, Lookup, moved
from kvtiers.metrics.ledger import Ledger
from kvtiers.types import (
    TOKEN_BYTES,
    Attempt,
    CacheConfig,
    FailReason,
    HitSplit,
    MissReason,
    Namespace,
    Purpose,
    SlotState,
    Tier,
    token_key,
)

NAMESPACE = Namespace("a-model")
"""The namespace of a test that needs only one."""


def prompt(name: int, tokens: int) -> list[int]:
    """`tokens` tokens of the text called `name`; two names share no token."""
    return list(range(name * 100_000, name * 100_000 + tokens))


def serving_cache(config: CacheConfig) -> PrefixCache:
    """The cache that serves, as what it is to its callers: its own leases are its only leases."""
    return cast(PrefixCache, UnifiedRadixCache(config))


class CacheDriver:
    """Drives one cache through its whole surface. `now` is the time that every call is given."""

    def __init__(
        self,
        config: CacheConfig,
        make_cache: Callable[[CacheConfig], PrefixCache] | None = None,
    ) -> None:
        self.config = config
        self.cache = make_cache(config) if make_cache else serving_cache(config)
        self.ledger = Ledger(
            config.page_tokens, config.pools, config.device_pages, config.host_pages
        )
        self.now = 0.0
        self.copies: dict[int, Copy] = {}
        """Ordered and not acknowledged, by operation, in order of issue."""
        self.late: dict[int, Copy] = {}
        """Acknowledged as late and not ended."""
        self.lookups: dict[int, Lookup] = {}
        self.cancelled: set[int] = set()
        """Operations that the cache asked to drop."""
        self.facts: list[FactTuple] = []
        """Every fact so far."""
        self._request_id = 0

    # ---- after every call

    def settle(self) -> None:
        """Take what the last call left, and check everything."""
        facts = self.cache.take_facts()
        self.facts += facts
        self.ledger.fold(facts)
        for order in self.cache.take_orders():
            if isinstance(order, Copy):
                self.copies[order.op_id] = order
            elif isinstance(order, Lookup):
                self.lookups[order.ticket_id] = order
            else:
                self.cancelled.add(order.op_id)
        self.check()

    def check(self) -> None:
        """Books, recount and structure agree; raises `InvariantViolation` where they do not."""
        self.ledger.check()
        differences = self.ledger.audit(self.cache.recount())
        if differences:
            raise InvariantViolation(f"booked minus counted: {differences}")
        if isinstance(self.cache, UnifiedRadixCache):
            check_structure(self.cache.state)

    # ---- requests

    def next_request(self) -> int:
        self._request_id += 1
        return self._request_id

    def admit(
        self,
        tokens: Sequence[int],
        namespace: Namespace = NAMESPACE,
        *,
        request_id: int | None = None,
        reserve_tokens: int = 0,
        ticket_id: int | None = None,
        attempt: Attempt = Attempt.FIRST,
    ) -> LeaseView | Blocked | Refused:
        """One attempt, as it ends; a granted one's split is checked to explain itself."""
        result = self.cache.admit(
            self.next_request() if request_id is None else request_id,
            token_key(tokens),
            namespace,
            self.now,
            reserve_tokens=reserve_tokens,
            ticket_id=ticket_id,
            attempt=attempt,
        )
        self.settle()
        if not isinstance(result, Blocked | Refused):
            _check_split(result.split, len(tokens), attempt)
        return result

    def lease(
        self,
        tokens: Sequence[int],
        namespace: Namespace = NAMESPACE,
        *,
        request_id: int | None = None,
        reserve_tokens: int = 0,
        ticket_id: int | None = None,
        attempt: Attempt = Attempt.FIRST,
    ) -> LeaseView:
        """An attempt that must be granted."""
        result = self.admit(
            tokens,
            namespace,
            request_id=request_id,
            reserve_tokens=reserve_tokens,
            ticket_id=ticket_id,
            attempt=attempt,
        )
        assert not isinstance(result, Blocked | Refused), f"not granted: {result}"
        return result

    def commit(self, lease: LeaseView, tokens: Sequence[int], computed: int | None = None) -> None:
        """Commit `computed` tokens (None: all) of the sequence `tokens`."""
        count = len(tokens) if computed is None else computed
        self.cache.commit(lease, token_key(tokens), count, self.now)
        self.settle()

    def extend(self, lease: LeaseView, tokens: int) -> bool:
        granted = self.cache.extend(lease, tokens, self.now)
        self.settle()
        return granted

    def fork(self, lease: LeaseView) -> LeaseView | Blocked:
        result = self.cache.fork(lease, self.next_request(), self.now)
        self.settle()
        return result

    def finish(self, lease: LeaseView) -> None:
        self.cache.finish(lease, self.now)
        self.settle()

    def retract(self, lease: LeaseView) -> None:
        self.cache.retract(lease, self.now)
        self.settle()

    def abort(self, lease: LeaseView) -> None:
        self.cache.abort(lease, self.now)
        self.settle()

    def serve(
        self,
        tokens: Sequence[int],
        namespace: Namespace = NAMESPACE,
        *,
        acks: bool = True,
        ticket_id: int | None = None,
    ) -> HitSplit:
        """A whole request, prompt only; with `acks` every copy ends as soon as it is ordered.

        Retries while copies that it waits for can be acknowledged. Returns the split of the
        granted attempt.
        """
        request_id = self.next_request()
        while True:
            result = self.admit(tokens, namespace, request_id=request_id, ticket_id=ticket_id)
            if not isinstance(result, Blocked):
                break
            assert acks, f"blocked on {result.on}, and no copy is to be acknowledged"
            assert self.copies, f"blocked on {result.on} with nothing in flight"
            self.ack_all()
        assert not isinstance(result, Refused), f"refused: {result}"
        if acks:
            self.ack_all()
        self.commit(result, tokens)
        if acks:
            self.ack_all()
        self.finish(result)
        return result.split

    # ---- copies

    def pending(self, purpose: Purpose) -> list[Copy]:
        """Copies of one purpose that wait for their acknowledgement, in order of issue."""
        return [copy for copy in self.copies.values() if copy.purpose is purpose]

    def ack(
        self,
        copy: Copy,
        pages_ok: int | None = None,
        failure: FailReason | None = None,
        *,
        ended: bool = True,
    ) -> None:
        """Say how a copy ended; None: all pages arrived. `ended=False`: late, it still runs."""
        ok = copy.pages if pages_ok is None else pages_ok
        if copy.op_id in self.late:
            del self.late[copy.op_id]
        else:
            del self.copies[copy.op_id]
            if not ended:
                self.late[copy.op_id] = copy
        tokens, num_bytes = moved(ok, self.config.page_tokens, self.config.pools)
        self.cache.ack(
            HiCacheAck(
                copy.op_id,
                ok,
                failure,
                ended,
                acked=self.now,
                num_tokens_by_pool=tokens,
                num_bytes=num_bytes,
            ),
            self.now,
        )
        self.settle()

    def fail(self, copy: Copy, pages_ok: int = 0, reason: FailReason = FailReason.TRANSFER) -> None:
        self.ack(copy, pages_ok, reason)

    def be_late(self, copy: Copy, pages_ok: int = 0) -> None:
        """The copy's deadline has passed; it may still write. `ack` it again when it has ended."""
        self.ack(copy, pages_ok, ended=False)

    def ack_all(self, purposes: Iterable[Purpose] = tuple(Purpose)) -> None:
        """Every copy in flight arrives whole, and so does what is ordered because of that."""
        wanted = set(purposes)
        while ready := [copy for copy in self.copies.values() if copy.purpose in wanted]:
            for copy in ready:
                self.ack(copy)

    # ---- storage

    def prefetch(
        self,
        tokens: Sequence[int],
        namespace: Namespace = NAMESPACE,
        *,
        request_id: int | None = None,
    ) -> int | None:
        ticket_id = self.cache.prefetch(
            self.next_request() if request_id is None else request_id,
            token_key(tokens),
            namespace,
            self.now,
        )
        self.settle()
        return ticket_id

    def found(self, ticket_id: int, pages: int) -> None:
        """Answer a look-up."""
        del self.lookups[ticket_id]
        self.cache.found(ticket_id, pages, self.now)
        self.settle()

    def prefetched(self, tokens: Sequence[int], pages: int | None = None) -> int:
        """A prefetch that storage answers with `pages` (None: all asked for) and that arrives."""
        ticket_id = self.prefetch(tokens)
        assert ticket_id is not None, "the prefetch was declined"
        self.found(ticket_id, self.lookups[ticket_id].pages if pages is None else pages)
        self.ack_all([Purpose.PREFETCH])
        return ticket_id

    def ready(self, ticket_id: int) -> bool:
        return self.cache.prefetch_ready(ticket_id, self.now)

    def cancel_prefetch(self, ticket_id: int) -> None:
        self.cache.cancel_prefetch(ticket_id, self.now)
        self.settle()

    # ---- commands

    def evict(self, tier: Tier, pages: int) -> int:
        freed = self.cache.evict(tier, pages, self.now)
        self.settle()
        return freed

    def flush(self, tier: Tier) -> int:
        removed = self.cache.flush(tier, self.now)
        self.settle()
        return removed

    def pin(
        self, tokens: Sequence[int], ttl_seconds: float, namespace: Namespace = NAMESPACE
    ) -> int | None:
        pin_id = self.cache.pin(token_key(tokens), namespace, self.now, ttl_seconds)
        self.settle()
        return pin_id

    def unpin(self, pin_id: int) -> None:
        self.cache.unpin(pin_id, self.now)
        self.settle()

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.cache.tick(self.now)
        self.settle()

    # ---- looking

    def match(
        self, tokens: Sequence[int], namespace: Namespace = NAMESPACE
    ) -> tuple[int, int, int]:
        """Device, usable and raw pages of a prompt."""
        lengths = self.cache.match(token_key(tokens), namespace)
        return lengths.device_pages, lengths.usable_pages, lengths.raw_pages

    def slots(self, tier: Tier) -> dict[SlotState, int]:
        """Pages of a tier by slot state."""
        return {
            state: pages for (where, state), pages in self.cache.recount().items() if where is tier
        }

    def resident(self, tier: Tier) -> int:
        return self.slots(tier)[SlotState.RESIDENT]

    def facts_of(self, kind: Fact) -> list[FactTuple]:
        return [fact for fact in self.facts if fact[0] is kind]

    def page_key(self, tokens: Sequence[int], pages: int) -> bytes:
        return token_key(tokens)[: pages * self.config.page_tokens * TOKEN_BYTES]


def resident_names(cache: PrefixCache, tier: Tier) -> set[bytes]:
    """Every page of a tier, named by its namespace's digest and all tokens up to its end."""
    assert isinstance(cache, UnifiedRadixCache)
    page_bytes = cache.config.page_tokens * TOKEN_BYTES
    names: set[bytes] = set()
    for run in cache.state.tree.walk():
        path = run.path()
        above = path[0].parent.key + b"".join(
            each.key[: each.pages * page_bytes] for each in path[:-1]
        )
        device = tier is Tier.DEVICE
        first, end = (0, run.device_pages) if device else (run.host_start, run.host_end)
        names.update(above + run.key[: page * page_bytes] for page in range(first + 1, end + 1))
    return names


def missed(split: HitSplit) -> dict[MissReason, int]:
    """Why a prompt's tokens were computed."""
    return dict(split.missed)


def _check_split(split: HitSplit, prompt_tokens: int, attempt: Attempt) -> None:
    if split.prompt != prompt_tokens:
        raise InvariantViolation(f"{split} does not sum to a prompt of {prompt_tokens} tokens")
    explained = sum(each.tokens for each in split.missed)
    if attempt is not Attempt.FORK and explained != split.computed:
        raise InvariantViolation(f"{explained} of {split.computed} computed tokens have a reason")
