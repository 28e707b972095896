"""Live against replayed: differences, and whether they are small enough.

    hits     tokens per tier; agree when every |live - replayed| <= tolerance * prompt tokens
    copies   tokens moved, evicted and lost, with their differences; reported
    ttft     median and p95 by the deepest tier that a request's hit came from; reported

Owns the definitions and the verdict. Pure: counts and requests in, numbers out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtiers.types import HitSplit
from kvtiers.validation.counts import COMPUTED, TIERS, Counts

HIT_TOLERANCE = 0.02
"""Of all prompt tokens. The criterion: hits of each tier, live against replayed."""
TTFT_TARGET = 0.25
"""Of the live median. Reported, and not part of the verdict."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One request of either side: where its prompt came from, and how soon it had a token."""

    split: HitSplit
    ttft_seconds: float

    @property
    def source(self) -> str:
        """The deepest tier that contributed, or `computed`."""
        hits = (self.split.device_hit, self.split.host_hit, self.split.storage_hit)
        for tier, tokens in zip(reversed(TIERS), reversed(hits), strict=True):
            if tokens:
                return tier
        return COMPUTED


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity of both sides, in tokens (or requests, where the name says so)."""

    name: str
    live: int
    replayed: int

    @property
    def difference(self) -> int:
        return self.replayed - self.live

    @property
    def relative(self) -> float | None:
        """Of the live value; None where that is 0 and the other is not."""
        if self.live:
            return self.difference / self.live
        return 0.0 if not self.replayed else None


@dataclass(frozen=True, slots=True)
class TtftRow:
    """Times to first token of the requests of one source, in seconds; None: there are none."""

    source: str
    live_requests: int
    replayed_requests: int
    live_median: float | None
    replayed_median: float | None
    live_p95: float | None
    replayed_p95: float | None

    @property
    def median_error(self) -> float | None:
        """Of the live median."""
        return _error(self.live_median, self.replayed_median)

    @property
    def p95_error(self) -> float | None:
        """Of the live 95th percentile."""
        return _error(self.live_p95, self.replayed_p95)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that was compared, and the verdict."""

    hits: tuple[Row, ...]
    copies: tuple[Row, ...]
    ttft: tuple[TtftRow, ...]
    requests: int
    equal_splits: int
    """Requests whose prompt came from the same tiers to the token on both sides."""
    prompt_tokens: int
    tolerance: float

    def share(self, row: Row) -> float:
        """The difference of a hit row as a share of all prompt tokens."""
        return row.difference / max(1, self.prompt_tokens)

    @property
    def hits_agree(self) -> bool:
        """Whether every tier's hits, and what was computed, are within the tolerance."""
        return all(abs(self.share(row)) <= self.tolerance for row in self.hits)

    @property
    def ttft_on_target(self) -> bool:
        """Whether every source with requests on both sides has its median within the target."""
        errors = [row.median_error for row in self.ttft]
        return all(abs(error) <= TTFT_TARGET for error in errors if error is not None)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON; differences are replayed minus live."""
        return {
            "passed": self.hits_agree,
            "hits": {
                "denominator": "prompt tokens of the live run",
                "prompt_tokens": self.prompt_tokens,
                "tolerance": self.tolerance,
                "agree": self.hits_agree,
                "tokens": {
                    row.name: {**_plain(row), "difference_of_prompt": self.share(row)}
                    for row in self.hits
                },
            },
            "copies": {row.name: _plain(row) for row in self.copies},
            "ttft": {
                "target": TTFT_TARGET,
                "on_target": self.ttft_on_target,
                "by_deepest_tier": {row.source: _plain_ttft(row) for row in self.ttft},
            },
            "requests": self.requests,
            "requests_with_equal_split": self.equal_splits,
        }


def compare(
    live: Counts,
    replayed: Counts,
    live_requests: Sequence[Answered],
    replayed_requests: Sequence[Answered],
    tolerance: float = HIT_TOLERANCE,
) -> Comparison:
    """Compare both sides; request `i` of one is request `i` of the other."""
    hits = tuple(
        Row(source, live.prompt_tokens[source], replayed.prompt_tokens[source])
        for source in (*TIERS, COMPUTED)
    )
    moved = {
        "backed up": (live.backed_up_tokens, replayed.backed_up_tokens),
        "loaded back": (live.loaded_back_tokens, replayed.loaded_back_tokens),
        "stored": (live.stored_tokens, replayed.stored_tokens),
        "prefetched": (live.prefetched_tokens, replayed.prefetched_tokens),
        "evicted from device": (live.evicted_tokens, replayed.evicted_tokens),
    }
    reasons = dict.fromkeys((*live.dropped_tokens, *replayed.dropped_tokens))
    for reason in reasons:
        both = (live.dropped_tokens.get(reason, 0), replayed.dropped_tokens.get(reason, 0))
        moved[f"dropped: {reason}"] = both
    moved["retracted requests"] = (live.retracted_requests, replayed.retracted_requests)
    pairs = list(zip(live_requests, replayed_requests, strict=True))
    return Comparison(
        hits=hits,
        copies=tuple(Row(name, *both) for name, both in moved.items()),
        ttft=tuple(
            _ttft_row(source, live_requests, replayed_requests) for source in (*TIERS, COMPUTED)
        ),
        requests=len(pairs),
        equal_splits=sum(one.split[:4] == other.split[:4] for one, other in pairs),
        prompt_tokens=live.all_prompt_tokens,
        tolerance=tolerance,
    )


def _ttft_row(source: str, live: Sequence[Answered], replayed: Sequence[Answered]) -> TtftRow:
    ours = [each.ttft_seconds for each in live if each.source == source]
    theirs = [each.ttft_seconds for each in replayed if each.source == source]
    return TtftRow(
        source,
        len(ours),
        len(theirs),
        _percentile(ours, 50),
        _percentile(theirs, 50),
        _percentile(ours, 95),
        _percentile(theirs, 95),
    )


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def _error(live: float | None, replayed: float | None) -> float | None:
    if live is None or replayed is None:
        return None
    return (replayed - live) / max(live, 1e-9)


def _plain(row: Row) -> dict[str, Any]:
    return {
        "live": row.live,
        "replayed": row.replayed,
        "difference": row.difference,
        "relative": row.relative,
    }


def _plain_ttft(row: TtftRow) -> dict[str, Any]:
    return {
        "live_requests": row.live_requests,
        "replayed_requests": row.replayed_requests,
        "median_seconds": {
            "live": row.live_median,
            "replayed": row.replayed_median,
            "error": row.median_error,
        },
        "p95_seconds": {
            "live": row.live_p95,
            "replayed": row.replayed_p95,
            "error": row.p95_error,
        },
    }
