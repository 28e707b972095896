"""What crosses the border of the core: work orders going out, acknowledgements coming in, facts.

Work orders say what a shell must do; a fact says what is true now. A fact is a plain tuple whose
first element is a `Fact`, because the core emits several per request on its hot path; `FIELDS`
names the others and `describe` spells a fact out. There is one fact per call and outcome, with
counts, never one per page. Pages are pages of the anchor pool `kv` unless a field says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

from kvtiers.types import FailReason, Namespace, PoolSpec, Purpose, SlotArray, SlotUnit

# --------------------------------------------------------------------------- work orders


@dataclass(slots=True, eq=False)
class PoolSlots:
    """The share of a copy in a pool with own slots other than the anchor `kv`.

    Slot `i` belongs to page `pages[i]` of the copy, counted from its first page, and arrives with
    that page: a recurrent state has one entry for the page it stands at the end of, a window's
    pool one per page.
    """

    pool: str
    source_slots: SlotArray
    target_slots: SlotArray
    pages: SlotArray


@dataclass(slots=True, eq=False)
class Copy:
    """An order to copy `pages` consecutive pages of one path from one tier to another.

    `source_slots` and `target_slots` are slots of the anchor pool, one per page, in path order;
    pools that follow it use the same slots. The storage side of a prefetch or a store has no
    slots: it is named by `namespace`, `path_key` and the page range.

    Pages `[first_page, first_page + pages)` count from the root of the namespace. `path_key` holds
    the tokens of pages `[0, first_page + pages)` as int32 bytes when the storage tier takes part,
    else it is empty: copies between device and host need no identity.
    """

    op_id: int
    purpose: Purpose
    first_page: int
    pages: int
    source_slots: SlotArray | None
    target_slots: SlotArray | None
    namespace: Namespace | None = None
    path_key: bytes = b""
    extra: tuple[PoolSlots, ...] = ()


@dataclass(slots=True, frozen=True)
class Lookup:
    """A question to storage: how many pages from `first_page` on, without a gap, does it hold?

    `path_key` is the int32 bytes of all whole pages of the prompt. The shell answers once with
    `found(ticket_id, pages)`; 0 when storage fails or the deadline passes.
    """

    ticket_id: int
    namespace: Namespace
    path_key: bytes
    first_page: int
    pages: int


@dataclass(slots=True, frozen=True)
class Cancel:
    """A copy that nobody wants any more. The shell may drop what it has not begun.

    The copy's acknowledgement is still due (with `FailReason.CANCELLED` for what was dropped).
    """

    op_id: int


WorkOrder: TypeAlias = Copy | Lookup | Cancel


# --------------------------------------------------------------------------- acknowledgements


@dataclass(slots=True, eq=False)
class HiCacheAck:
    """How a copy ended, or that its deadline has passed while it still runs.

    `pages_ok` leading pages arrived; the first page after them failed for `failure`, and all after
    that count as failed with it. `ended=False` says the wait is over but the copy may still write
    its target: slots are quarantined until a second ack with `ended=True` (whose `pages_ok` is
    ignored). Times are monotonic seconds; `started` and `finished` bracket the copy alone and are
    None where the device cannot time, in which case tokens and bytes count and the duration has no
    sample.
    """

    op_id: int
    pages_ok: int
    failure: FailReason | None = None
    ended: bool = True
    queued: float = 0.0
    started: float | None = None
    finished: float | None = None
    acked: float = 0.0
    num_tokens_by_pool: dict[str, int] | None = None
    num_bytes: int = 0

    @property
    def timing_enabled(self) -> bool:
        return self.started is not None and self.finished is not None


class Moved(NamedTuple):
    """What a number of pages of the anchor pool amounts to."""

    tokens_by_pool: dict[str, int]
    num_bytes: int


def moved(
    pages: int,
    page_tokens: int,
    pools: Sequence[PoolSpec],
    extra_slots: Mapping[str, int] | None = None,
) -> Moved:
    """Tokens by pool with own slots, and bytes over all pools, of `pages` anchor pages.

    `extra_slots` says how many slots of other pools with own slots moved along: pages of tokens,
    or states, which count as one each. The two counting rules of the field in one place: a pool
    that follows another is left out of the tokens and is part of the bytes.
    """
    slots = {"kv": pages, **(extra_slots or {})}
    tokens: dict[str, int] = {}
    num_bytes = 0
    for pool in pools:
        count = slots.get(pool.follows or pool.name, 0)
        num_bytes += count * pool.bytes_per_slot
        if pool.follows is None and pool.name in slots:
            tokens[pool.name] = count if pool.unit is SlotUnit.STATE else count * page_tokens
    return Moved(tokens, num_bytes)


# --------------------------------------------------------------------------- facts


class Fact(IntEnum):
    """What a fact tuple says; `FIELDS` names its other elements."""

    # requests and slots
    ADMITTED = 0
    BOOKED = 1
    COMPUTED = 2
    PUBLISHED = 3
    EXTENDED = 4
    ENDED = 5
    BLOCKED = 6
    REFUSED = 7
    # copies
    ISSUED = 8
    ACKED = 9
    SETTLED = 10
    DECLINED = 11
    # leaving a tier
    LEFT = 12
    # storage, as seen by requests
    FOUND = 13
    USED = 14
    UNUSED = 15
    # ghosts
    REGRET = 16
    # commands
    PINNED = 17
    UNPINNED = 18
    # measured by the shells
    COPY_TIMED = 19
    STORAGE_OP = 20
    EVICTION_TIMED = 21
    FORWARD_STALL = 22
    BACKUP_REUSED = 28
    # told by the scheduler
    REQUEST_ENDED = 23
    RETRACTED = 24
    FIRST_TOKEN = 25
    DECODED = 26
    PREFILLED = 27


FactTuple: TypeAlias = tuple[Any, ...]

FIELDS: dict[Fact, tuple[str, ...]] = {
    # A lease was granted. `private_pages` left free; `joined_tokens` of the host hit are being
    # loaded by another request's copy. The lease's own load-back follows as ISSUED.
    Fact.ADMITTED: ("lease_id", "attempt", "prompt_tokens", "joined_tokens", "private_pages"),
    # The attempt's first chunk has its result and its loads are acknowledged.
    Fact.BOOKED: ("lease_id", "attempt", "split"),
    # `tokens` of the prompt were computed by a chunk (input).
    Fact.COMPUTED: ("lease_id", "attempt", "tokens"),
    # Private pages became resident on device: `new_pages` in new places of the tree,
    # `donated_pages` where it had host copies only.
    Fact.PUBLISHED: ("lease_id", "new_pages", "donated_pages"),
    # The lease took more private pages (decode growth).
    Fact.EXTENDED: ("lease_id", "pages"),
    # The lease ended. Of its private pages `forfeited_pages` had never been published and
    # `duplicate_pages` were published by somebody else first (entered and left in one moment).
    Fact.ENDED: (
        "lease_id",
        "attempt",
        "ended_by",
        "prompt_tokens",
        "booked",
        "forfeited_pages",
        "duplicate_pages",
    ),
    # An admission holds nothing and waits; `tokens` is the prompt.
    Fact.BLOCKED: ("request_id", "on", "tokens"),
    # A request that can never fit.
    Fact.REFUSED: ("request_id", "pages", "capacity_pages"),
    # A copy was ordered; its target slots (if any) went from free to reserved.
    Fact.ISSUED: ("op_id", "purpose", "pages"),
    # A copy's wait ended: `ok_pages` resident in the target, `failed_pages` forfeited,
    # `late_pages` quarantined.
    Fact.ACKED: ("op_id", "purpose", "ok_pages", "failed_pages", "late_pages", "failure"),
    # A late copy has ended: its quarantined slots are free.
    Fact.SETTLED: ("op_id", "purpose", "pages"),
    # A copy that could have been made was not ordered.
    Fact.DECLINED: ("purpose", "reason", "pages"),
    # Copies left a tier; resident slots became free.
    Fact.LEFT: ("tier", "outcome", "reason", "pages"),
    # Storage holds `tokens` past the request's local match.
    Fact.FOUND: ("ticket_id", "tokens"),
    # Of the tokens found, `tokens` were used by the request ...
    Fact.USED: ("ticket_id", "tokens"),
    # ... and `tokens` were not, because.
    Fact.UNUSED: ("ticket_id", "reason", "tokens"),
    # Tokens asked for again after they left their last tier, `tier`, for `reason` (LeaveReason).
    Fact.REGRET: ("tier", "reason", "tokens"),
    Fact.PINNED: ("pin_id", "tokens"),
    Fact.UNPINNED: ("pin_id", "tokens"),
    # One merged operation of a transfer: seconds are None where the device cannot time.
    Fact.COPY_TIMED: ("purpose", "pages", "queued_seconds", "copy_seconds", "ack_seconds"),
    # One call to a store, measured by the framework around it. `op` is a `StorageOp`; `pages` and
    # `num_bytes` are those that succeeded; `kind` is the `FailReason` of the first that did not.
    Fact.STORAGE_OP: ("backend", "op", "seconds", "pages", "num_bytes", "kind"),
    Fact.EVICTION_TIMED: ("seconds",),
    Fact.FORWARD_STALL: ("seconds",),
    # For so many pages a load-back was the first since a backup had copied them to host.
    Fact.BACKUP_REUSED: ("pages",),
    # A request left the server. Times in seconds; None where it never got so far.
    Fact.REQUEST_ENDED: ("request_id", "outcome", "prompt_tokens", "output_tokens", "split", "e2e"),
    Fact.RETRACTED: ("request_id", "tokens"),
    Fact.FIRST_TOKEN: ("request_id", "seconds"),
    # Decode made `tokens` in one step, `seconds` after each sequence's previous token.
    Fact.DECODED: ("tokens", "seconds"),
    # One pass computed `tokens` of prompts and nothing else, in `seconds` without waits for loads.
    Fact.PREFILLED: ("tokens", "seconds"),
}


def describe(fact: FactTuple) -> dict[str, Any]:
    """A fact as a dictionary, for logs and people."""
    kind = Fact(fact[0])
    return {"fact": kind.name.lower(), **dict(zip(FIELDS[kind], fact[1:], strict=True))}
