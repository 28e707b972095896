"""The exact surface of the cache: what every implementation offers and every shell may use.

`UnifiedRadixCache` is the implementation that serves; `testing.ModelCache` is the one written to
be obviously right. Both are driven by the same tests.

Rules that hold for every method:

* Time is the argument `now` (monotonic seconds); nothing else in here knows a clock.
* A mutating call leaves facts in `facts` and work orders in `orders`. The caller drains both after
  the call (`take_facts`, `take_orders`), hands facts to the ledger and orders to the controller.
* A copy changes what is resident only when it is acknowledged.
* A call that raises has changed nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvtiers.events import FactTuple, HiCacheAck, WorkOrder
from kvtiers.types import (
    Attempt,
    BlockedOn,
    CacheConfig,
    HitSplit,
    Namespace,
    SlotArray,
    SlotState,
    Tier,
)


class MatchLengths(NamedTuple):
    """How much of a prompt is there, in pages from the root (device <= usable <= raw).

    `device_pages` are resident on device; `usable_pages` are on device or host, and all components
    of the model agree; `raw_pages` is the length of the `kv` match alone, before the last-token
    rule.
    """

    device_pages: int
    usable_pages: int
    raw_pages: int


class LeaseView(Protocol):
    """A granted admission attempt: the right to use a path until it ends, exactly once.

        0          shared_tokens      computed_tokens      capacity_tokens
        |--- tree's slots ---|------------ private slots -----------|
        |--- hits (usable) --|-|--- computed so far --|--- to come --|
                             ^ split.prompt - split.computed is where computing begins

    Positions below `shared_tokens` belong to the tree and are read-only: where computing begins
    before it (the last page of a prompt that was wholly cached), the forward pass must not write
    those positions.
    """

    @property
    def lease_id(self) -> int: ...
    @property
    def request_id(self) -> int: ...
    @property
    def split(self) -> HitSplit: ...
    @property
    def shared_tokens(self) -> int: ...
    @property
    def computed_tokens(self) -> int:
        """Positions below this have KV: hits, and what commits have reported."""
        ...

    @property
    def capacity_tokens(self) -> int:
        """Positions below this have a slot."""
        ...

    @property
    def load_ops(self) -> tuple[int, ...]:
        """Copies this lease relies on, own and joined, that are not yet acknowledged."""
        ...

    @property
    def voided(self) -> bool:
        """A load it relied on failed: publish nothing, `abort`, admit anew."""
        ...

    @property
    def ended(self) -> bool: ...

    def block_table(self) -> SlotArray:
        """Device slot of every page the lease may touch, in path order."""
        ...


@dataclass(frozen=True, slots=True)
class Blocked:
    """An attempt that got nothing and holds nothing; worth another try once `on` changes."""

    on: BlockedOn


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that can never be admitted here. It counts nothing."""

    needs_pages: int
    capacity_pages: int


class PrefixCache(Protocol):
    """A hierarchical prefix cache over device, host and storage."""

    config: CacheConfig

    # ---- looking (pure)
    def match(self, key: bytes, namespace: Namespace) -> MatchLengths:
        """What of the prompt `key` (int32 bytes) is there. Changes nothing, not even recency."""
        ...

    def recount(self) -> dict[tuple[Tier, SlotState], int]:
        """Pages of the anchor pool by tier and slot state, counted afresh from the structure."""
        ...

    # ---- the life of a request
    def prefetch(self, request_id: int, key: bytes, namespace: Namespace, now: float) -> int | None:
        """Begin the storage prefetch of a waiting request; returns its ticket id.

        None: declined (the reason is a DECLINED fact). Emits a `Lookup`.
        """
        ...

    def found(self, ticket_id: int, pages: int, now: float) -> None:
        """Storage's answer to the `Lookup`: `pages` from its first page on, without a gap."""
        ...

    def prefetch_ready(self, ticket_id: int, now: float) -> bool:
        """Whether, under the prefetch policy, the request need not wait any longer."""
        ...

    def cancel_prefetch(self, ticket_id: int, now: float) -> None:
        """The request is gone: what was found is unused, what is in flight is revoked."""
        ...

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
    ) -> LeaseView | Blocked | Refused:
        """One admission attempt: match, lock, evict, reserve, order loads. All, or nothing held.

        `key` is the whole prompt as int32 bytes (at least one token). Slots are reserved for the
        prompt and `reserve_tokens` more. `ticket_id` closes the request's prefetch when granted.
        """
        ...

    def extend(self, lease: LeaseView, tokens: int, now: float) -> bool:
        """Make `capacity_tokens` at least `tokens`; False: no room, nothing changed."""
        ...

    def commit(self, lease: LeaseView, key: bytes, computed_tokens: int, now: float) -> None:
        """KV of positions below `computed_tokens` exists: book it, publish complete pages.

        `key` holds at least that many tokens (prompt and output). The first commit books the hits;
        it must not come before `load_ops` is empty, and not on a voided lease.
        """
        ...

    def fork(self, lease: LeaseView, request_id: int, now: float) -> LeaseView | Blocked:
        """A further sequence on the published pages of `lease`; recomputes its partial page."""
        ...

    def finish(self, lease: LeaseView, now: float) -> None: ...
    def retract(self, lease: LeaseView, now: float) -> None: ...
    def abort(self, lease: LeaseView, now: float) -> None:
        """Ends the lease at any stage; a voided one is counted as voided."""
        ...

    # ---- copies
    def ack(self, ack: HiCacheAck, now: float) -> None:
        """Apply how a copy ended. Any order; applied in order of issue per purpose."""
        ...

    # ---- commands and time
    def evict(self, tier: Tier, pages: int, now: float) -> int:
        """Free up to `pages` of a tier now, oldest first; returns how many became free."""
        ...

    def pin(self, key: bytes, namespace: Namespace, now: float, ttl_seconds: float) -> int | None:
        """Keep the matched prefix until `unpin` or the TTL; None when nothing matched."""
        ...

    def unpin(self, pin_id: int, now: float) -> None: ...
    def attach_storage(self, now: float) -> None: ...
    def detach_storage(self, now: float) -> None: ...
    def flush(self, tier: Tier, now: float) -> int:
        """Remove every unleased page from a tier (device or host); returns pages removed."""
        ...

    def tick(self, now: float) -> None:
        """Time has passed: expire pins, run the cleaner, let prefetch deadlines fire."""
        ...

    # ---- draining
    def take_facts(self) -> list[FactTuple]: ...
    def take_orders(self) -> list[WorkOrder]: ...
