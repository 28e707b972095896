"""The books: what the ledger writes into, one small record per thing that is counted.

Owns the counters and the enums they are split by; every closed label value has its entry from the
start. Knows neither facts (`ledger`) nor names of series (`schema`, `readout`). Sizes are pages of
the anchor pool or tokens, as each field's name says; nothing derived is stored: tokens of pages,
bytes and ratios are computed when somebody reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvtiers.metrics.histogram import (
    COPY_SECONDS,
    GIGABYTES_PER_SECOND,
    PAGES_PER_CALL,
    REQUEST_SECONDS,
    STAGE_SECONDS,
    STORAGE_SECONDS,
    TOKEN_SECONDS,
    Histogram,
)
from kvtiers.types import (
    BlockedOn,
    DeclineReason,
    FailReason,
    LeaveOutcome,
    LeaveReason,
    MissReason,
    Purpose,
    RequestOutcome,
    SlotState,
    StorageOp,
    Tier,
    UnfulfilledReason,
)

STAGES = ("queued", "copy", "ack")
"""Where a copy spends its time: waiting to begin, copying, waiting to be applied."""


class TierBook:
    """Slots of the device or the host tier by state, and what entered and left it, in pages.

    free + reserved + private + resident + quarantined = capacity, and entered = resident + left.
    """

    __slots__ = (
        "capacity_pages",
        "entered_pages",
        "free",
        "left_pages",
        "private",
        "quarantined",
        "reserved",
        "resident",
        "tier",
    )

    def __init__(self, tier: Tier, capacity_pages: int) -> None:
        self.tier = tier
        self.capacity_pages = capacity_pages
        self.free = capacity_pages
        self.reserved = 0
        self.private = 0
        self.resident = 0
        self.quarantined = 0
        self.entered_pages = 0
        self.left_pages: dict[tuple[LeaveOutcome, LeaveReason], int] = {
            (outcome, reason): 0 for outcome in LeaveOutcome for reason in LeaveReason
        }

    @property
    def overdrawn(self) -> int:
        """Pages by which any state is below zero: slots given away that were not there."""
        states = (self.free, self.reserved, self.private, self.resident, self.quarantined)
        return -sum(state for state in states if state < 0)

    def left_by(self, outcome: LeaveOutcome) -> int:
        """Pages that left with this outcome, for any reason."""
        return sum(pages for (how, _), pages in self.left_pages.items() if how is outcome)

    def states(self) -> dict[SlotState, int]:
        return {
            SlotState.FREE: self.free,
            SlotState.RESERVED: self.reserved,
            SlotState.PRIVATE: self.private,
            SlotState.RESIDENT: self.resident,
            SlotState.QUARANTINED: self.quarantined,
        }

    def to_dict(self) -> dict[str, Any]:
        left: dict[str, dict[str, int]] = {}
        for (outcome, reason), pages in self.left_pages.items():
            if pages:
                left.setdefault(str(outcome), {})[str(reason)] = pages
        return {
            "capacity_pages": self.capacity_pages,
            "slots": {str(state): pages for state, pages in self.states().items()},
            "entered_pages": self.entered_pages,
            "left_pages": left,
        }


class AttemptBook:
    """Admission attempts of one class (first, replay, fork), and the prompts they booked.

    planned = booked + voided + aborted + open, where open ones are granted and not yet booked.
    `ended_*` sum over booked leases that ended with their whole prompt computed, so that
    ended_prompt = ended_hit + ended_computed compares three facts of different moments.
    """

    __slots__ = (
        "aborted",
        "booked",
        "computed_tokens",
        "device_hit_tokens",
        "ended_computed_tokens",
        "ended_hit_tokens",
        "ended_prompt_tokens",
        "host_hit_tokens",
        "input_tokens",
        "joined_tokens",
        "missed_tokens",
        "open",
        "planned",
        "storage_hit_tokens",
        "voided",
    )

    def __init__(self) -> None:
        self.planned = 0
        self.booked = 0
        self.voided = 0
        self.aborted = 0
        self.open = 0
        self.device_hit_tokens = 0
        self.host_hit_tokens = 0
        self.storage_hit_tokens = 0
        self.computed_tokens = 0  # by the split, at booking
        self.input_tokens = 0  # by the chunks, as they come
        self.joined_tokens = 0
        self.missed_tokens: dict[MissReason, int] = dict.fromkeys(MissReason, 0)
        self.ended_prompt_tokens = 0
        self.ended_hit_tokens = 0
        self.ended_computed_tokens = 0

    def to_dict(self) -> dict[str, Any]:
        plain = {
            name: getattr(self, name) for name in sorted(self.__slots__) if name != "missed_tokens"
        }
        missed = {str(reason): tokens for reason, tokens in self.missed_tokens.items()}
        return {**plain, "missed_tokens": missed}


class CopyBook:
    """Copies of one purpose, in pages.

    offered = issued + declined; issued = ok + failed + in flight. A late copy has failed when its
    deadline passes (late = settled + unsettled): what it still writes belongs to nobody.
    `in_flight_by_op` and `unsettled_by_op` remember what was ordered, so that an acknowledgement
    of another size shows up as an imbalance.
    """

    __slots__ = (
        "copy_seconds",
        "declined_pages",
        "failed_by_reason",
        "failed_pages",
        "in_flight_by_op",
        "in_flight_pages",
        "issued_pages",
        "late_pages",
        "offered_pages",
        "ok_pages",
        "ops",
        "settled_pages",
        "stage_seconds",
        "target",
        "unsettled_by_op",
        "unsettled_pages",
    )

    def __init__(self, target: TierBook | None) -> None:
        self.target = target
        """The tier whose slots receive the pages; None for storage, which keeps its own books."""
        self.ops = 0
        self.offered_pages = 0
        self.issued_pages = 0
        self.ok_pages = 0
        self.failed_pages = 0
        self.late_pages = 0
        self.settled_pages = 0
        self.in_flight_pages = 0
        self.unsettled_pages = 0
        self.in_flight_by_op: dict[int, int] = {}
        self.unsettled_by_op: dict[int, int] = {}
        self.failed_by_reason: dict[FailReason, int] = dict.fromkeys(FailReason, 0)
        self.declined_pages: dict[DeclineReason, int] = dict.fromkeys(DeclineReason, 0)
        self.copy_seconds = Histogram(COPY_SECONDS)
        self.stage_seconds = {stage: Histogram(STAGE_SECONDS) for stage in STAGES}

    def to_dict(self, page_tokens: int, page_bytes: int) -> dict[str, Any]:
        return {
            "ops": self.ops,
            "offered_pages": self.offered_pages,
            "issued_pages": self.issued_pages,
            "ok_pages": self.ok_pages,
            "ok_tokens": self.ok_pages * page_tokens,
            "ok_bytes": self.ok_pages * page_bytes,
            "failed_pages": {str(r): pages for r, pages in self.failed_by_reason.items() if pages},
            "declined_pages": {str(r): pages for r, pages in self.declined_pages.items() if pages},
            "late_pages": self.late_pages,
            "settled_pages": self.settled_pages,
            "in_flight_ops": len(self.in_flight_by_op),
            "in_flight_pages": self.in_flight_pages,
            "copy_seconds": self.copy_seconds.to_dict(),
            "stage_seconds": {s: hist.to_dict() for s, hist in self.stage_seconds.items()},
        }


class PrefetchBook:
    """Tokens that storage was found to hold for waiting requests: found = used + unused + pending.

    `pending_by_ticket` remembers what each request was told, so that a ticket that is credited
    more than it found, or twice, shows up as an imbalance.
    """

    __slots__ = (
        "found_tokens",
        "pending_by_ticket",
        "pending_tokens",
        "unused_tokens",
        "used_tokens",
    )

    def __init__(self) -> None:
        self.found_tokens = 0
        self.used_tokens = 0
        self.unused_tokens: dict[UnfulfilledReason, int] = dict.fromkeys(UnfulfilledReason, 0)
        self.pending_tokens = 0
        self.pending_by_ticket: dict[int, int] = {}

    def to_dict(self) -> dict[str, Any]:
        return {
            "found_tokens": self.found_tokens,
            "used_tokens": self.used_tokens,
            "unused_tokens": {str(r): tokens for r, tokens in self.unused_tokens.items()},
            "pending_tokens": self.pending_tokens,
        }


class BackendBook:
    """Calls to one store, timed by the framework around it."""

    __slots__ = ("errors", "op_seconds")

    def __init__(self) -> None:
        self.op_seconds = {op: Histogram(STORAGE_SECONDS) for op in StorageOp}
        self.errors: dict[tuple[StorageOp, FailReason], int] = {
            (op, kind): 0 for op in StorageOp for kind in FailReason
        }

    def errors_of(self, kind: FailReason) -> int:
        """Calls, of any operation, whose first failed page failed for `kind`."""
        return sum(calls for (_, failed_by), calls in self.errors.items() if failed_by is kind)

    def to_dict(self) -> dict[str, Any]:
        errors: dict[str, dict[str, int]] = {}
        for (op, kind), calls in self.errors.items():
            if calls:
                errors.setdefault(str(op), {})[str(kind)] = calls
        return {
            "ops": {str(op): hist.to_dict() for op, hist in self.op_seconds.items()},
            "errors": errors,
        }


class StorageCallBook:
    """Calls to all stores: by backend, and how many pages and how fast each read and write."""

    __slots__ = ("backends", "read_gbps", "read_pages", "write_gbps", "write_pages")

    def __init__(self, backends: Iterable[str]) -> None:
        self.backends = {name: BackendBook() for name in backends}
        self.read_pages = Histogram(PAGES_PER_CALL)
        self.read_gbps = Histogram(GIGABYTES_PER_SECOND)
        self.write_pages = Histogram(PAGES_PER_CALL)
        self.write_gbps = Histogram(GIGABYTES_PER_SECOND)

    def backend(self, name: str) -> BackendBook:
        """The book of a store; opened, all zeros, when the store is first heard of."""
        book = self.backends.get(name)
        if book is None:
            book = self.backends[name] = BackendBook()
        return book

    def to_dict(self) -> dict[str, Any]:
        return {
            "backends": {name: book.to_dict() for name, book in self.backends.items()},
            "read_pages": self.read_pages.to_dict(),
            "read_gbps": self.read_gbps.to_dict(),
            "write_pages": self.write_pages.to_dict(),
            "write_gbps": self.write_gbps.to_dict(),
        }


class RequestBook:
    """Requests as the scheduler saw them leave, and what they waited for.

    prompt = device_hit + host_hit + storage_hit + computed + unsplit, where unsplit prompts
    belong to requests that left before any split was booked.
    """

    __slots__ = (
        "blocked",
        "computed_tokens",
        "device_hit_tokens",
        "end_to_end_seconds",
        "ended",
        "first_token_seconds",
        "host_hit_tokens",
        "inter_token_seconds",
        "output_tokens",
        "prompt_tokens",
        "refused",
        "retracted",
        "retracted_tokens",
        "storage_hit_tokens",
        "unsplit_prompt_tokens",
    )

    def __init__(self) -> None:
        self.ended: dict[RequestOutcome, int] = dict.fromkeys(RequestOutcome, 0)
        self.blocked: dict[BlockedOn, int] = dict.fromkeys(BlockedOn, 0)
        self.refused = 0
        self.retracted = 0
        self.retracted_tokens = 0
        self.prompt_tokens = 0
        self.unsplit_prompt_tokens = 0
        self.output_tokens = 0
        self.device_hit_tokens = 0
        self.host_hit_tokens = 0
        self.storage_hit_tokens = 0
        self.computed_tokens = 0
        self.first_token_seconds = Histogram(REQUEST_SECONDS)
        self.inter_token_seconds = Histogram(TOKEN_SECONDS)
        self.end_to_end_seconds = Histogram(REQUEST_SECONDS)

    def to_dict(self) -> dict[str, Any]:
        return {
            "ended": {str(outcome): n for outcome, n in self.ended.items()},
            "blocked": {str(on): n for on, n in self.blocked.items()},
            "refused": self.refused,
            "retracted": self.retracted,
            "retracted_tokens": self.retracted_tokens,
            "prompt_tokens": self.prompt_tokens,
            "unsplit_prompt_tokens": self.unsplit_prompt_tokens,
            "output_tokens": self.output_tokens,
            "device_hit_tokens": self.device_hit_tokens,
            "host_hit_tokens": self.host_hit_tokens,
            "storage_hit_tokens": self.storage_hit_tokens,
            "computed_tokens": self.computed_tokens,
            "first_token_seconds": self.first_token_seconds.to_dict(),
            "inter_token_seconds": self.inter_token_seconds.to_dict(),
            "end_to_end_seconds": self.end_to_end_seconds.to_dict(),
        }


def copy_books(device: TierBook, host: TierBook) -> dict[Purpose, CopyBook]:
    """One book per purpose, bound to the tier that its copies fill."""
    targets = {Tier.DEVICE: device, Tier.HOST: host, Tier.STORAGE: None}
    return {purpose: CopyBook(targets[purpose.target]) for purpose in Purpose}
