"""Which configurations deserve a full replay: all of them replayed shortly, hopeless ones in part.

Owns the order of the short replays and when one of them is given up. The rule needs no guess: a
configuration is beaten by one that costs no more and answers `BEATEN` times sooner at the 95th
percentile. That is proved for a replay under way as soon as more than a twentieth of *all* requests
of the trace had a later first token than that, whatever the others will have.

Cheapest first, so that those that may beat a configuration are known when it begins. Not used
where a hit ratio is wanted: a configuration that answers later may find more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtiers.planner.evaluate import Evaluation, GivenUp, Pool
from kvtiers.planner.search import Candidate, Prices, Target
from kvtiers.types import Retention, WritePolicy

BEATEN = 1.05

_LIKELY_FIRST = (
    (WritePolicy.WRITE_BACK, Retention.INCLUSIVE),
    (WritePolicy.WRITE_BACK, Retention.EXCLUSIVE),
    (WritePolicy.WRITE_THROUGH, Retention.INCLUSIVE),
)
"""Between configurations that cost the same, those that usually answer soonest."""


@dataclass(slots=True)
class Screened:
    """What the short replays came to."""

    evaluations: list[Evaluation] = field(default_factory=list)
    given_up: list[GivenUp] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.evaluations) + len(self.given_up)


def screen(
    pool: Pool,
    candidates: Sequence[Candidate],
    target: Target,
    prices: Prices,
    progress: Callable[[int], None],
) -> Screened:
    """Replay every candidate shortly; `progress` is told how many are done."""
    screened = Screened()

    def patience_seconds(candidate: Candidate) -> float | None:
        return None if target.hit_ratio is not None else patience(candidate, screened, prices)

    ordered = sorted(candidates, key=lambda c: (c.cost(prices), c.sizes, _likely(c)))
    for done in pool.map(ordered, full=False, patience_seconds=patience_seconds):
        if isinstance(done, GivenUp):
            screened.given_up.append(done)
        else:
            screened.evaluations.append(done)
        progress(len(screened))
    screened.evaluations.sort(key=lambda e: e.candidate)
    screened.given_up.sort(key=lambda e: e.candidate)
    return screened


def patience(candidate: Candidate, screened: Screened, prices: Prices) -> float | None:
    """The TTFT p95 above which a candidate is beaten by one that is known; None: nothing beats it
    yet."""
    cost = candidate.cost(prices)
    known = [e.ttft_p95_seconds for e in screened.evaluations if e.candidate.cost(prices) <= cost]
    return BEATEN * min(known) if known else None


def _likely(candidate: Candidate) -> int:
    policy = (candidate.write_policy, candidate.retention)
    return _LIKELY_FIRST.index(policy) if policy in _LIKELY_FIRST else len(_LIKELY_FIRST)
