"""The ledger: a fold from facts into books that balance. The only place where a counter changes.

Owns the books and how each fact changes them. Must not know the cache, the engine, Prometheus or
the names of series; it reads no clock. `fold` is synchronous and loses nothing. Readers in other
threads hold `lock`, so that they never see half of a call's facts.

How facts move slots (pages of the anchor pool; `left` counts pages by outcome and reason):

    fact                    tier        free  reserved  private  resident  quarantined
    ADMITTED, EXTENDED      device       -                +
    PUBLISHED               device                        -         +                  entered
    ENDED forfeited         device       +                -
    ENDED duplicate         device       +                -                            entered, left
    ISSUED                  of target    -       +
    ACKED ok                of target            -                  +                  entered
    ACKED failed            of target    +       -
    ACKED late              of target            -                            +
    SETTLED                 of target    +                                    -
    LEFT                    its own      +                          -                  left

Storage has no slots here: other processes write and evict there, and the store keeps its own
books.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvtiers.errors import InvariantViolation
from kvtiers.events import Fact, FactTuple, describe, moved
from kvtiers.metrics.books import (
    AttemptBook,
    PrefetchBook,
    RequestBook,
    StorageCallBook,
    TierBook,
    copy_books,
)
from kvtiers.metrics.histogram import COPY_SECONDS, Histogram
from kvtiers.metrics.identities import IDENTITIES
from kvtiers.metrics.savings import Savings
from kvtiers.types import (
    Attempt,
    EndedBy,
    LeaveOutcome,
    LeaveReason,
    PoolSpec,
    Purpose,
    SlotState,
    StorageOp,
    Tier,
)

# Bound once: looking up a member on its enum costs more than the comparison it is needed for.
_DUPLICATE = (LeaveOutcome.DUPLICATE, LeaveReason.DUPLICATE)
_VOIDED, _ABORTED = EndedBy.VOIDED, EndedBy.ABORTED
_FIRST = Attempt.FIRST
_READ, _WRITE = StorageOp.READ, StorageOp.WRITE


class _Lease:
    """What an open lease holds and has booked, to be compared with what its end says."""

    __slots__ = (
        "attempt",
        "book",
        "booked",
        "computed_tokens",
        "hit_tokens",
        "private_pages",
        "prompt_tokens",
    )

    attempt: Attempt
    book: AttemptBook
    booked: bool
    computed_tokens: int
    hit_tokens: int
    private_pages: int
    prompt_tokens: int


class Ledger:
    """Books over everything a cache and its shells report, and the identities between them.

    Public attributes are the books; read them under `lock` from another thread than the one that
    folds. `device.left_pages` and the like are keyed by closed enums and complete from the start.
    """

    def __init__(
        self,
        page_tokens: int,
        pools: Sequence[PoolSpec],
        device_pages: int,
        host_pages: int = 0,
        backends: Iterable[str] = (),
    ) -> None:
        self.lock = threading.RLock()
        self.page_tokens = page_tokens
        self.page_bytes = moved(1, page_tokens, pools).num_bytes
        """Bytes that move with one page of the anchor pool: its own and its followers'."""

        self.device = TierBook(Tier.DEVICE, device_pages)
        self.host = TierBook(Tier.HOST, host_pages)
        self.tiers = {Tier.DEVICE: self.device, Tier.HOST: self.host}
        self.attempts = {attempt: AttemptBook() for attempt in Attempt}
        self.first = self.attempts[Attempt.FIRST]
        self.replay = self.attempts[Attempt.REPLAY]
        self.fork = self.attempts[Attempt.FORK]
        self.copies = copy_books(self.device, self.host)
        self.backup = self.copies[Purpose.BACKUP]
        self.load_back = self.copies[Purpose.LOAD_BACK]
        self.prefetch = self.copies[Purpose.PREFETCH]
        self.store = self.copies[Purpose.STORE]
        self.asked = PrefetchBook()
        self.requests = RequestBook()
        self.calls = StorageCallBook(backends)
        self.regret_tokens: dict[tuple[Tier, LeaveReason], int] = {
            (tier, reason): 0 for tier in self.tiers for reason in LeaveReason
        }
        self.pinned_tokens_by_pin: dict[int, int] = {}
        self.pinned_tokens = 0
        self.eviction_seconds = Histogram(COPY_SECONDS)
        self.forward_stall_seconds = 0.0
        self.backup_reused_pages = 0
        self.savings = Savings()

        self.held_private_pages = 0
        """Private pages that open leases hold, summed from what each took and gave back."""
        self.contradictions = 0
        self.first_contradiction: dict[str, Any] | None = None
        self.recount_difference_pages = 0
        self.audits = 0
        self._leases: dict[int, _Lease] = {}
        by_kind = {kind: getattr(self, f"_{kind.name.lower()}") for kind in Fact}
        self._handlers = [by_kind[kind] for kind in sorted(Fact)]

    # ------------------------------------------------------------------ the fold

    def fold(self, facts: list[FactTuple]) -> None:
        """Book `facts` in order. Call it once per call into the cache, with all that call's facts.

        A fact that contradicts earlier ones is booked as far as it can be and shows up in
        `imbalances`; it never raises, so that a bug in the books cannot end a request.
        """
        handlers = self._handlers
        self.lock.acquire()  # `with` costs twice as much, and this runs several times per request
        try:
            for fact in facts:
                handlers[fact[0]](fact)
        finally:
            self.lock.release()

    def _contradiction(self, fact: FactTuple) -> None:
        self.contradictions += 1
        if self.first_contradiction is None:
            self.first_contradiction = describe(fact)

    # ---- requests and slots

    def _admitted(self, fact: FactTuple) -> None:
        _, lease_id, attempt, prompt_tokens, joined_tokens, private_pages = fact
        if lease_id in self._leases:
            self._contradiction(fact)
        book = self.attempts[attempt]
        book.planned += 1
        book.open += 1
        if joined_tokens:
            book.joined_tokens += joined_tokens
        device = self.device
        device.free -= private_pages
        device.private += private_pages
        self.held_private_pages += private_pages
        self._leases[lease_id] = lease = _Lease()
        lease.attempt = attempt
        lease.book = book
        lease.booked = False
        lease.prompt_tokens = prompt_tokens
        lease.private_pages = private_pages
        lease.hit_tokens = lease.computed_tokens = 0

    def _extended(self, fact: FactTuple) -> None:
        _, lease_id, pages = fact
        device = self.device
        device.free -= pages
        device.private += pages
        lease = self._leases.get(lease_id)
        if lease is None:
            self._contradiction(fact)
            return
        lease.private_pages += pages
        self.held_private_pages += pages

    def _booked(self, fact: FactTuple) -> None:
        _, lease_id, attempt, split = fact
        device_hit, host_hit, storage_hit, computed, missed = split
        hit_tokens = device_hit + host_hit + storage_hit
        lease = self._leases.get(lease_id)
        if lease is None or lease.booked or lease.attempt is not attempt:
            self._contradiction(fact)
            book = self.attempts[attempt]
        else:
            book = lease.book
            lease.booked = True
            lease.hit_tokens = hit_tokens
        book.booked += 1
        book.open -= 1
        book.device_hit_tokens += device_hit
        if host_hit:
            book.host_hit_tokens += host_hit
        if storage_hit:
            book.storage_hit_tokens += storage_hit
        book.computed_tokens += computed
        missed_tokens = book.missed_tokens
        for reason, tokens in missed:
            missed_tokens[reason] += tokens
        if hit_tokens and attempt is _FIRST:
            self.savings.hit(split)

    def _computed(self, fact: FactTuple) -> None:
        _, lease_id, attempt, tokens = fact
        lease = self._leases.get(lease_id)
        if lease is None or lease.attempt is not attempt:
            self._contradiction(fact)
            self.attempts[attempt].input_tokens += tokens
            return
        lease.book.input_tokens += tokens
        lease.computed_tokens += tokens

    def _published(self, fact: FactTuple) -> None:
        _, lease_id, new_pages, donated_pages = fact
        pages = new_pages + donated_pages
        device = self.device
        device.private -= pages
        device.resident += pages
        device.entered_pages += pages
        lease = self._leases.get(lease_id)
        if lease is None:
            self._contradiction(fact)
            return
        lease.private_pages -= pages
        self.held_private_pages -= pages

    def _ended(self, fact: FactTuple) -> None:
        _, lease_id, attempt, ended_by, prompt_tokens, booked, forfeited, duplicate = fact
        device = self.device
        if forfeited:
            device.private -= forfeited
            device.free += forfeited
        if duplicate:
            device.private -= duplicate
            device.free += duplicate
            device.entered_pages += duplicate
            device.left_pages[_DUPLICATE] += duplicate
        lease = self._leases.pop(lease_id, None)
        if lease is None or lease.attempt is not attempt or lease.booked is not booked:
            self._contradiction(fact)
            return
        if lease.prompt_tokens != prompt_tokens:
            self._contradiction(fact)
        book = lease.book
        # What the lease held is taken off as the ledger saw it: a slot that its end forgot stays
        # private in the tier and shows as `device_private`.
        self.held_private_pages -= lease.private_pages
        if not booked:
            book.open -= 1
            if ended_by is _VOIDED:
                book.voided += 1
            elif ended_by is _ABORTED:
                book.aborted += 1
            else:
                self._contradiction(fact)  # finished or retracted, and yet never booked
        elif ended_by is _VOIDED:
            self._contradiction(fact)  # a voided attempt books nothing
        elif ended_by is not _ABORTED:
            book.ended_prompt_tokens += prompt_tokens
            book.ended_hit_tokens += lease.hit_tokens
            book.ended_computed_tokens += lease.computed_tokens

    def _blocked(self, fact: FactTuple) -> None:
        self.requests.blocked[fact[2]] += 1

    def _refused(self, fact: FactTuple) -> None:
        self.requests.refused += 1

    # ---- copies

    def _issued(self, fact: FactTuple) -> None:
        _, op_id, purpose, pages = fact
        book = self.copies[purpose]
        if op_id in book.in_flight_by_op:
            self._contradiction(fact)
        book.ops += 1
        book.offered_pages += pages
        book.issued_pages += pages
        book.in_flight_pages += pages
        book.in_flight_by_op[op_id] = pages
        target = book.target
        if target is not None:
            target.free -= pages
            target.reserved += pages

    def _acked(self, fact: FactTuple) -> None:
        _, op_id, purpose, ok_pages, failed_pages, late_pages, failure = fact
        book = self.copies[purpose]
        ordered = book.in_flight_by_op.pop(op_id, None)
        if ordered is None:
            self._contradiction(fact)
        else:
            book.in_flight_pages -= ordered
        book.ok_pages += ok_pages
        lost_pages = failed_pages + late_pages
        if lost_pages:
            book.failed_pages += lost_pages
            if failure is not None:
                book.failed_by_reason[failure] += lost_pages
            if late_pages:
                book.late_pages += late_pages
                book.unsettled_pages += late_pages
                book.unsettled_by_op[op_id] = late_pages
        target = book.target
        if target is not None:
            target.reserved -= ok_pages + lost_pages
            target.free += failed_pages
            target.quarantined += late_pages
            target.resident += ok_pages
            target.entered_pages += ok_pages

    def _settled(self, fact: FactTuple) -> None:
        _, op_id, purpose, pages = fact
        book = self.copies[purpose]
        late_pages = book.unsettled_by_op.pop(op_id, None)
        if late_pages is None:
            self._contradiction(fact)
        else:
            book.unsettled_pages -= late_pages
        book.settled_pages += pages
        if book.target is not None:
            book.target.quarantined -= pages
            book.target.free += pages

    def _declined(self, fact: FactTuple) -> None:
        _, purpose, reason, pages = fact
        book = self.copies[purpose]
        book.offered_pages += pages
        book.declined_pages[reason] += pages

    # ---- leaving, and being asked for again

    def _left(self, fact: FactTuple) -> None:
        _, tier, outcome, reason, pages = fact
        book = self.tiers.get(tier)
        if book is None:
            self._contradiction(fact)  # storage keeps its own books
            return
        book.resident -= pages
        book.free += pages
        book.left_pages[outcome, reason] += pages

    def _regret(self, fact: FactTuple) -> None:
        _, tier, reason, tokens = fact
        self.regret_tokens[tier, reason] += tokens

    # ---- storage, as requests see it

    def _found(self, fact: FactTuple) -> None:
        _, ticket_id, tokens = fact
        asked = self.asked
        if ticket_id in asked.pending_by_ticket:
            self._contradiction(fact)
        asked.found_tokens += tokens
        if tokens:
            asked.pending_tokens += tokens
            asked.pending_by_ticket[ticket_id] = tokens

    def _used(self, fact: FactTuple) -> None:
        _, ticket_id, tokens = fact
        self.asked.used_tokens += tokens
        self._credit(fact, ticket_id, tokens)

    def _unused(self, fact: FactTuple) -> None:
        _, ticket_id, reason, tokens = fact
        self.asked.unused_tokens[reason] += tokens
        self._credit(fact, ticket_id, tokens)

    def _credit(self, fact: FactTuple, ticket_id: int, tokens: int) -> None:
        if not tokens:
            return
        asked = self.asked
        pending = asked.pending_by_ticket.get(ticket_id, 0)
        if tokens > pending:
            self._contradiction(fact)
        credited = min(tokens, pending)
        asked.pending_tokens -= credited
        if credited < pending:
            asked.pending_by_ticket[ticket_id] = pending - credited
        else:
            asked.pending_by_ticket.pop(ticket_id, None)

    # ---- commands

    def _pinned(self, fact: FactTuple) -> None:
        _, pin_id, tokens = fact
        if pin_id in self.pinned_tokens_by_pin:
            self._contradiction(fact)
        self.pinned_tokens_by_pin[pin_id] = tokens
        self.pinned_tokens += tokens

    def _unpinned(self, fact: FactTuple) -> None:
        _, pin_id, tokens = fact
        if self.pinned_tokens_by_pin.pop(pin_id, None) != tokens:
            self._contradiction(fact)
        self.pinned_tokens -= tokens

    # ---- measured by the shells

    def _copy_timed(self, fact: FactTuple) -> None:
        _, purpose, pages, queued_seconds, copy_seconds, ack_seconds = fact
        book = self.copies[purpose]
        if copy_seconds is not None:
            book.copy_seconds.observe(copy_seconds)
            self.savings.copied(purpose, pages * self.page_tokens, copy_seconds)
        stages = (("queued", queued_seconds), ("copy", copy_seconds), ("ack", ack_seconds))
        for stage, seconds in stages:
            if seconds is not None:
                book.stage_seconds[stage].observe(seconds)

    def _storage_op(self, fact: FactTuple) -> None:
        _, backend, op, seconds, pages, num_bytes, kind = fact
        calls = self.calls
        book = calls.backend(backend)
        book.op_seconds[op].observe(seconds)
        if kind is not None:
            book.errors[op, kind] += 1
        if op is _READ:
            pages_per_call, speed = calls.read_pages, calls.read_gbps
        elif op is _WRITE:
            pages_per_call, speed = calls.write_pages, calls.write_gbps
        else:
            return
        if pages:
            pages_per_call.observe(pages)
        if num_bytes and seconds > 0:
            speed.observe(num_bytes / seconds / 1e9)

    def _eviction_timed(self, fact: FactTuple) -> None:
        self.eviction_seconds.observe(fact[1])

    def _backup_reused(self, fact: FactTuple) -> None:
        self.backup_reused_pages += fact[1]
        if self.backup_reused_pages > self.backup.ok_pages:
            self._contradiction(fact)  # more was used than was ever written

    def _forward_stall(self, fact: FactTuple) -> None:
        self.forward_stall_seconds += fact[1]

    # ---- told by the scheduler

    def _request_ended(self, fact: FactTuple) -> None:
        _, _request_id, outcome, prompt_tokens, output_tokens, split, end_to_end_seconds = fact
        book = self.requests
        book.ended[outcome] += 1
        book.prompt_tokens += prompt_tokens
        book.output_tokens += output_tokens
        if split is None:
            book.unsplit_prompt_tokens += prompt_tokens
        else:
            book.device_hit_tokens += split.device_hit
            book.host_hit_tokens += split.host_hit
            book.storage_hit_tokens += split.storage_hit
            book.computed_tokens += split.computed
        if end_to_end_seconds is not None:
            book.end_to_end_seconds.observe(end_to_end_seconds)

    def _retracted(self, fact: FactTuple) -> None:
        self.requests.retracted += 1
        self.requests.retracted_tokens += fact[2]

    def _first_token(self, fact: FactTuple) -> None:
        self.requests.first_token_seconds.observe(fact[2])

    def _decoded(self, fact: FactTuple) -> None:
        _, tokens, seconds = fact
        self.requests.inter_token_seconds.observe(seconds, tokens)

    def _prefilled(self, fact: FactTuple) -> None:
        self.savings.passed(fact[1], fact[2])

    # ------------------------------------------------------------------ balance

    def imbalances(self) -> dict[str, int]:
        """Left minus right of every identity, by name; all 0 when the books balance."""
        with self.lock:
            return {identity.name: identity.imbalance(self) for identity in IDENTITIES}

    def open_ends(self) -> dict[str, int]:
        """What has begun and not ended; all 0 once every request has left and every copy ended.

        Not an imbalance: the identities hold at every step. A test that has let everything end
        checks that this is all 0.
        """
        with self.lock:
            return {
                "leases": len(self._leases),
                "private_pages": self.device.private,
                "copies": sum(len(book.in_flight_by_op) for book in self.copies.values()),
                "late_copies": sum(len(book.unsettled_by_op) for book in self.copies.values()),
                "quarantined_pages": self.device.quarantined + self.host.quarantined,
                "reserved_pages": self.device.reserved + self.host.reserved,
                "found_tokens": self.asked.pending_tokens,
                "pins": len(self.pinned_tokens_by_pin),
            }

    def check(self) -> None:
        """Raise `InvariantViolation`, with every number spelled out, unless the books balance."""
        with self.lock:
            broken = [identity for identity in IDENTITIES if identity.imbalance(self)]
            if not broken:
                return
            lines = [f"{each.spelled_out(self)} ({each.because})" for each in broken]
            if self.first_contradiction is not None:
                lines.append(f"first contradicting fact: {self.first_contradiction}")
        raise InvariantViolation("the books do not balance:\n  " + "\n  ".join(lines))

    def audit(
        self, recount: Mapping[tuple[Tier, SlotState], int]
    ) -> dict[tuple[Tier, SlotState], int]:
        """Compare the slot states with `PrefixCache.recount()`; booked minus counted where not 0.

        The sum of the differences stays visible as the imbalance `recount` until the next audit.
        A state that `recount` leaves out counts as 0 pages.
        """
        with self.lock:
            differences = {}
            for tier, book in self.tiers.items():
                for state, pages in book.states().items():
                    difference = pages - recount.get((tier, state), 0)
                    if difference:
                        differences[tier, state] = difference
            self.audits += 1
            self.recount_difference_pages = sum(abs(pages) for pages in differences.values())
            return differences

    # ------------------------------------------------------------------ reading

    def to_dict(self) -> dict[str, Any]:
        """All books as plain JSON with stable keys, and whether they balance."""
        with self.lock:
            imbalances = self.imbalances()
            return {
                "page_tokens": self.page_tokens,
                "page_bytes": self.page_bytes,
                "tiers": {str(tier): book.to_dict() for tier, book in self.tiers.items()},
                "attempts": {str(each): book.to_dict() for each, book in self.attempts.items()},
                "copies": {
                    str(purpose): book.to_dict(self.page_tokens, self.page_bytes)
                    for purpose, book in self.copies.items()
                },
                "asked": self.asked.to_dict(),
                "requests": self.requests.to_dict(),
                "calls": self.calls.to_dict(),
                "regret_tokens": {
                    f"{tier}/{reason}": tokens
                    for (tier, reason), tokens in self.regret_tokens.items()
                    if tokens
                },
                "pinned_tokens": self.pinned_tokens,
                "eviction_seconds": self.eviction_seconds.to_dict(),
                "forward_stall_seconds": self.forward_stall_seconds,
                "backup_reused_tokens": self.backup_reused_pages * self.page_tokens,
                "savings": self.savings.to_dict(),
                "open": self.open_ends(),
                "audits": self.audits,
                "imbalances": imbalances,
                "balanced": not any(imbalances.values()),
            }
