"""Probes: how often a rare state was reached, by name.

Owns which facts count as which state, and which states a test may demand (`REQUIRED`). States that
no fact tells are counted by whoever sees them (`hit`).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvtiers.events import Fact, FactTuple

_BY_FIELDS: dict[Fact, tuple[int, ...]] = {
    Fact.ENDED: (2, 3),
    Fact.BLOCKED: (2,),
    Fact.REFUSED: (),
    Fact.SETTLED: (2,),
    Fact.DECLINED: (1, 2),
    Fact.LEFT: (1, 2, 3),
    Fact.UNUSED: (2,),
    Fact.REGRET: (1, 2),
    Fact.PINNED: (),
    Fact.UNPINNED: (),
}
"""Facts that are a state by themselves, and the fields that tell such states apart."""

_TIERS = ("device", "host", "storage")


class Probes:
    """Counts by name. Facts are counted by their fields and named only when someone asks."""

    def __init__(self) -> None:
        self._counts: Counter[Any] = Counter()

    def hit(self, name: str) -> None:
        self._counts[name] += 1

    def see(self, facts: list[FactTuple]) -> None:
        """Count the states that facts tell of."""
        counts = self._counts
        for fact in facts:
            kind = fact[0]
            fields = _BY_FIELDS.get(kind)
            if fields is not None:
                counts[(kind, *[fact[field] for field in fields])] += 1
            elif kind is Fact.ACKED:
                self._acked(fact)
            elif kind is Fact.BOOKED:
                self._booked(fact)
            elif kind is Fact.PUBLISHED and fact[3]:
                counts["published by donation"] += 1
            elif kind is Fact.ADMITTED and fact[4]:
                counts["admitted joining a load"] += 1

    def _acked(self, fact: FactTuple) -> None:
        _, _, purpose, ok_pages, failed_pages, late_pages, failure = fact
        how = "failed" if failed_pages else "late" if late_pages else "whole"
        if ok_pages and how != "whole":
            how += " in part"
        self._counts[Fact.ACKED, purpose, how] += 1
        if failure is not None:
            self._counts[Fact.ACKED, purpose, failure] += 1

    def _booked(self, fact: FactTuple) -> None:
        split = fact[3]
        hits = [name for name, tokens in zip(_TIERS, split[:3], strict=True) if tokens]
        self._counts[Fact.BOOKED, "+".join(hits) or "nothing"] += 1
        for missed in split[4]:
            self._counts[Fact.BOOKED, "missed", missed[0]] += 1

    def counts(self) -> Counter[str]:
        """How often each state was reached."""
        return Counter({_name(key): count for key, count in self._counts.items()})


def _name(key: Any) -> str:
    if isinstance(key, str):
        return key
    return " ".join([Fact(key[0]).name.lower(), *map(str, key[1:])])


_COPIES = ("backup", "load_back", "prefetch", "store")

REQUIRED = frozenset(
    {
        "run split while its backup is in flight",
        "run split while its load is in flight",
        "run split while its store is in flight",
        "load wanted by a third request",
        "several requests voided by one load",
        "voided twice",
        "admitted joining a load",
        "aborted while loading",
        "committed a page that is being loaded",
        "published by donation",
        "prefetch followed by another request",
        "follower asked for its own rest",
        "prefetch revoked",
        "late write after the deadline",
        "late copy ended before an earlier one was acknowledged",
        "slots wanted while some are quarantined",
        "host quarantined to the last free slot",
        "acknowledged out of order",
        "storage detached with copies in flight",
        "another storage attached",
        "prompt of one token",
        "prompt one token short of a page",
        "prompt of one page",
        "prompt one token longer than a page",
        "prompt that is a strict prefix",
        "prompt longer than the device",
        "same tokens in two namespaces",
        "forked",
        "refused misuse",
        "refused",
        "acked store orphaned",
        "acked backup orphaned",
        "ended first retracted",
        "ended first voided",
        "ended replay finished",
        "ended fork finished",
        "blocked eviction",
        "blocked prefetch",
        "blocked device_capacity",
        *(f"acked {copy} {how}" for copy in _COPIES for how in ("whole", "failed", "late")),
        *(f"settled {copy}" for copy in _COPIES),
    }
)
"""States that a few dozen seeds reach together; the test suite demands every one."""
