"""The identities that the books must satisfy, as data that is executed.

Owns which sums must be equal; knows the books only by the names of their terms. A term is a dotted
path from the ledger (`device.free`); a term that is a table stands for the sum of its values.
Documentation prints the same objects that the checks run, so the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from kvtiers.types import Attempt, Purpose


def _value(term: Any) -> int:
    return term if isinstance(term, int) else sum(term.values())


def _nothing(books: Any) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Identity:
    """`sum(left) == sum(right)`, always; `because` says what breaks when it does not hold."""

    name: str
    left: tuple[str, ...]
    right: tuple[str, ...]
    because: str
    _left: Callable[[Any], Any] = field(init=False, repr=False, compare=False)
    _right: Callable[[Any], Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.left, f"identity {self.name} says nothing"
        object.__setattr__(self, "_left", attrgetter(*self.left))
        object.__setattr__(self, "_right", attrgetter(*self.right) if self.right else _nothing)

    def sides(self, books: Any) -> tuple[int, int]:
        """The two sums, left and right."""
        return _total(self._left(books)), _total(self._right(books))

    def imbalance(self, books: Any) -> int:
        """Left minus right; 0 when the books balance."""
        left, right = self.sides(books)
        return left - right

    def formula(self) -> str:
        return f"{' + '.join(self.left)} = {' + '.join(self.right) or '0'}"

    def spelled_out(self, books: Any) -> str:
        """The formula with every term's value, for an error message."""
        sides = (
            " + ".join(f"{term} {_value(attrgetter(term)(books))}" for term in side) or "0"
            for side in (self.left, self.right)
        )
        return f"{self.name}: {' = '.join(sides)} is off by {self.imbalance(books)}"


def _total(terms: Any) -> int:
    # attrgetter gives a bare value for one name and a tuple for several.
    if isinstance(terms, tuple):
        return sum(term if isinstance(term, int) else sum(term.values()) for term in terms)
    return _value(terms)


def _of_tier(tier: str, filled_by: tuple[str, ...]) -> list[Identity]:
    return [
        Identity(
            f"{tier}_slots",
            tuple(
                f"{tier}.{state}"
                for state in ("free", "reserved", "private", "resident", "quarantined")
            ),
            (f"{tier}.capacity_pages",),
            "slots appeared or vanished",
        ),
        Identity(
            f"{tier}_overdrawn",
            (f"{tier}.overdrawn",),
            (),
            "more slots left a state than were in it",
        ),
        Identity(
            f"{tier}_residency",
            (f"{tier}.entered_pages",),
            (f"{tier}.resident", f"{tier}.left_pages"),
            "a page is resident that never entered, or left without an outcome",
        ),
        Identity(
            f"{tier}_reserved",
            (f"{tier}.reserved",),
            tuple(f"{purpose}.in_flight_pages" for purpose in filled_by),
            "slots are reserved for no copy, or a copy in flight has no slots",
        ),
        Identity(
            f"{tier}_quarantined",
            (f"{tier}.quarantined",),
            tuple(f"{purpose}.unsettled_pages" for purpose in filled_by),
            "slots are quarantined for no late copy, or reused while one may still write them",
        ),
    ]


def _of_attempt(attempt: str) -> list[Identity]:
    return [
        Identity(
            f"attempts_{attempt}",
            (f"{attempt}.planned",),
            tuple(f"{attempt}.{end}" for end in ("booked", "voided", "aborted", "open")),
            "an admission attempt ended in no way, or in two",
        ),
        Identity(
            f"prompt_{attempt}",
            (f"{attempt}.ended_prompt_tokens",),
            (f"{attempt}.ended_hit_tokens", f"{attempt}.ended_computed_tokens"),
            "prompt tokens of ended leases were neither hit nor computed, or both",
        ),
        Identity(
            f"missed_{attempt}",
            (f"{attempt}.computed_tokens",),
            (f"{attempt}.missed_tokens",),
            "a computed token has no reason, or two",
        ),
    ]


def _of_copies(purpose: str) -> list[Identity]:
    return [
        Identity(
            f"copies_{purpose}",
            (f"{purpose}.issued_pages",),
            tuple(f"{purpose}.{end}" for end in ("ok_pages", "failed_pages", "in_flight_pages")),
            "an acknowledgement covers more or fewer pages than its order",
        ),
        Identity(
            f"failures_{purpose}",
            (f"{purpose}.failed_pages",),
            (f"{purpose}.failed_by_reason",),
            "pages failed without a reason",
        ),
        Identity(
            f"late_{purpose}",
            (f"{purpose}.late_pages",),
            (f"{purpose}.settled_pages", f"{purpose}.unsettled_pages"),
            "a late copy ended with more or fewer pages than it was late with",
        ),
    ]


IDENTITIES: tuple[Identity, ...] = (
    *_of_tier("device", filled_by=("load_back",)),
    *_of_tier("host", filled_by=("backup", "prefetch")),
    Identity(
        "device_private",
        ("device.private",),
        ("held_private_pages",),
        "private slots belong to no lease: a lease ended without giving all of its slots back",
    ),
    Identity("host_private", ("host.private",), (), "a request holds host slots of its own"),
    *(identity for attempt in Attempt for identity in _of_attempt(attempt)),
    *(identity for purpose in Purpose for identity in _of_copies(purpose)),
    Identity(
        "storage_found",
        ("asked.found_tokens",),
        ("asked.used_tokens", "asked.unused_tokens", "asked.pending_tokens"),
        "tokens found in storage were credited twice, or to nobody",
    ),
    Identity(
        "storage_put",
        ("store.offered_pages",),
        ("store.ok_pages", "store.failed_pages", "store.declined_pages", "store.in_flight_pages"),
        "pages offered to storage have no outcome",
    ),
    Identity(
        "request_prompts",
        ("requests.prompt_tokens",),
        (
            "requests.device_hit_tokens",
            "requests.host_hit_tokens",
            "requests.storage_hit_tokens",
            "requests.computed_tokens",
            "requests.unsplit_prompt_tokens",
        ),
        "a request's prompt is not the sum of its split",
    ),
    Identity(
        "contradictions",
        ("contradictions",),
        (),
        "a fact named a lease, copy, ticket or pin that is not open, or contradicts an earlier one",
    ),
    Identity(
        "recount",
        ("recount_difference_pages",),
        (),
        "the last full recount of the cache's structure disagreed with the slot states",
    ),
)
"""Every identity, in the order they are reported. The empty side of one is 0."""

IDENTITY_NAMES = tuple(identity.name for identity in IDENTITIES)
