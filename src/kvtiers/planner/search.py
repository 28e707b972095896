"""The space of configurations, and what of it the curve rules out before anything is replayed.

A configuration is a size per tier, a write policy and a retention. The curve gives an upper bound
of what it can hit (`hit_bound`), in milliseconds for the whole space; what cannot be the answer by
that bound is excluded with the reason, and only the rest is replayed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kvtiers.errors import ConfigError
from kvtiers.planner.columns import TraceColumns
from kvtiers.planner.curve import Definition, HitCurve, exact_curve
from kvtiers.planner.units import GIB, gib_text
from kvtiers.types import Retention, WritePolicy

POLICIES: Sequence[tuple[WritePolicy, Retention]] = (
    (WritePolicy.WRITE_THROUGH, Retention.INCLUSIVE),
    (WritePolicy.WRITE_THROUGH_SELECTIVE, Retention.INCLUSIVE),
    (WritePolicy.WRITE_BACK, Retention.INCLUSIVE),
    (WritePolicy.WRITE_BACK, Retention.EXCLUSIVE),
)

NOTHING_GAINED = 0.002
"""A larger size must raise the bound by this ratio over the next smaller one to be looked at."""


class Excluded(StrEnum):
    """Why a configuration was not replayed."""

    OVER_BUDGET = "over_budget"
    HOST_BELOW_DEVICE = "host_below_device"  # inclusive, so it holds nothing the device has not
    NOTHING_GAINED = "nothing_gained"  # the next smaller size hits as much
    TARGET_OUT_OF_REACH = "target_out_of_reach"  # the bound lies below the wanted hit ratio
    CANNOT_KEEP_UP = "cannot_keep_up"  # even at the bound, prefill needs more time than there is


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """One configuration; sizes in GiB, 0 for no tier."""

    device_gib: float
    host_gib: float
    storage_gib: float
    write_policy: WritePolicy
    retention: Retention

    @property
    def policy(self) -> str:
        """The policy in two words."""
        return f"{self.write_policy}, {self.retention}"

    @property
    def sizes(self) -> str:
        """The sizes below the device, for people."""
        host = f"{gib_text(self.host_gib)} host" if self.host_gib else "no host tier"
        return host + (f" + {gib_text(self.storage_gib)} storage" if self.storage_gib else "")

    def cost(self, prices: Prices) -> float:
        """What the tiers below the device cost, in the prices' unit."""
        return self.host_gib * prices.host_per_gib + self.storage_gib * prices.storage_per_gib


@dataclass(frozen=True, slots=True)
class Prices:
    """What a GiB costs, in any unit; only the ratio counts. Default: host memory = 1."""

    host_per_gib: float = 1.0
    storage_per_gib: float = 0.03

    def __post_init__(self) -> None:
        if min(self.host_per_gib, self.storage_per_gib) < 0:
            raise ConfigError("prices cannot be negative")


@dataclass(frozen=True, slots=True)
class Target:
    """What the plan is for; None where it does not matter. A budget is in GiB of host memory plus
    storage at the price ratio."""

    ttft_p95_seconds: float | None = None
    hit_ratio: float | None = None
    budget_gib: float | None = None

    def __post_init__(self) -> None:
        if self.ttft_p95_seconds is not None and not self.ttft_p95_seconds > 0:
            raise ConfigError(
                f"a TTFT p95 of {self.ttft_p95_seconds:g} s cannot be reached; a target is a time "
                "above 0, for example --ttft-p95 1.5s or 800ms"
            )
        if self.hit_ratio is not None and not 0 < self.hit_ratio <= 1:
            raise ConfigError(
                f"a hit ratio of {self.hit_ratio:g} cannot be reached; a target is above 0 and at "
                "most 1, for example --hit-ratio 0.3 for 30 % of prompt tokens"
            )
        if self.budget_gib is not None and not self.budget_gib > 0:
            raise ConfigError(
                f"a budget of {self.budget_gib:g} GiB buys nothing; --budget-gib is above 0"
            )

    @property
    def text(self) -> str:
        """The target in words."""
        parts = []
        if self.ttft_p95_seconds is not None:
            parts.append(f"TTFT p95 of at most {self.ttft_p95_seconds:g} s")
        if self.hit_ratio is not None:
            parts.append(f"a hit ratio of at least {100 * self.hit_ratio:g} %")
        if self.budget_gib is not None:
            parts.append(f"a budget of {gib_text(self.budget_gib)} of host memory or its worth")
        return " and ".join(parts) or "the most for the money"


class Bound:
    """Upper bounds of the hit ratio (definition `tokens`) from one exact curve.

    The curve knows prompts only. A server also keeps what it generated, and a next turn's prompt
    may find that: `output_reuse` is the share of prompt tokens that can be found no other way.
    """

    def __init__(self, columns: TraceColumns, kv_bytes_per_token: int) -> None:
        self.curve: HitCurve = exact_curve(columns, Definition.TOKENS)
        self.block_gib = columns.block_tokens * kv_bytes_per_token / GIB
        self.output_reuse = 0.0
        if columns.output_block_ids is not None:
            cold = columns.previous < 0
            made = np.isin(columns.block_ids, columns.output_block_ids) & cold
            tokens = columns.tokens_of_block[made].sum()
            self.output_reuse = float(tokens / columns.input_tokens.sum())

    def of_gib(self, gib: float) -> float:
        """The most that one LRU tier of this size can hit."""
        return min(1.0, self.curve.hit_ratio(gib / self.block_gib) + self.output_reuse)

    def of(self, candidate: Candidate) -> float:
        """The most that a configuration can hit: tiers that hold distinct data, all of them full.

        Under write_through they hold less (what is on device is mostly on host as well); how much
        less depends on what runs at a time, so that is for the replay to say.
        """
        return self.of_gib(candidate.device_gib + candidate.host_gib + candidate.storage_gib)

    @property
    def saturated_gib(self) -> float:
        """The size above which no prompt finds more."""
        return self.curve.saturated_at_blocks * self.block_gib


@dataclass(frozen=True, slots=True)
class Pruned:
    """What is left to replay, and what was excluded."""

    considered: int
    kept: list[Candidate]
    excluded: Counter[Excluded]


def sizes_for(
    bound: Bound, device_gib: float, largest_gib: float, page_gib: float = 0.0
) -> list[float]:
    """Host sizes worth a look: 0, then doubling from half the device to where the curve is flat,
    but to no more than `largest_gib`, and from no less than a page."""
    last = min(bound.saturated_gib, largest_gib)
    return _steps(max(device_gib / 2, 2 * page_gib), last, 2.0, largest_gib)


def storage_sizes_for(
    bound: Bound, device_gib: float, largest_gib: float, page_gib: float = 0.0
) -> list[float]:
    """Storage sizes worth a look: 0, then in steps of four from four times the device."""
    last = min(bound.saturated_gib, largest_gib)
    return _steps(max(4 * device_gib, 2 * page_gib), last, 4.0, largest_gib)


def _steps(first: float, last: float, factor: float, largest: float) -> list[float]:
    """0, then powers of two from at most `first`, and above half of it, to the first one that
    reaches `last`."""
    sizes = [0.0]
    size = 2.0 ** math.floor(math.log2(first))
    while sizes[-1] < last:
        sizes.append(min(size, largest))
        size *= factor
    return sizes


def candidates_for(
    device_gib: float,
    host_sizes: Sequence[float],
    storage_sizes: Sequence[float],
    policies: Sequence[tuple[WritePolicy, Retention]] = POLICIES,
) -> list[Candidate]:
    """Every combination that makes sense: storage needs a host, and no host needs no policy."""
    found = [Candidate(device_gib, 0.0, 0.0, *policies[0])]
    for host in host_sizes:
        if not host:
            continue
        for storage in storage_sizes:
            found += [Candidate(device_gib, host, storage, *policy) for policy in policies]
    return found


def prune(
    candidates: Sequence[Candidate],
    bound: Bound,
    target: Target,
    prices: Prices,
    prefill_share: float,
) -> Pruned:
    """Exclude what the bound rules out.

    `prefill_share` is the share of the trace's time that prefill would take without any cache. The
    configuration without a host tier is always kept: it is what the others are compared with.
    """
    excluded: Counter[Excluded] = Counter()
    kept: list[Candidate] = []
    best_smaller: dict[tuple[float, WritePolicy, Retention], float] = {}
    for candidate in sorted(candidates):
        if not candidate.host_gib:
            kept.append(candidate)
            continue
        reason = _why_not(candidate, bound, target, prices, prefill_share, best_smaller)
        if reason is None:
            kept.append(candidate)
        else:
            excluded[reason] += 1
    return Pruned(len(candidates), kept, excluded)


def _why_not(
    candidate: Candidate,
    bound: Bound,
    target: Target,
    prices: Prices,
    prefill_share: float,
    best_smaller: dict[tuple[float, WritePolicy, Retention], float],
) -> Excluded | None:
    if target.budget_gib is not None:
        budget = target.budget_gib * prices.host_per_gib
        if candidate.cost(prices) > budget * (1 + 1e-9):
            return Excluded.OVER_BUDGET
    distinct = candidate.write_policy is WritePolicy.WRITE_BACK
    if not distinct and candidate.host_gib <= candidate.device_gib and not candidate.storage_gib:
        return Excluded.HOST_BELOW_DEVICE
    most = bound.of(candidate)
    if target.hit_ratio is not None and most < target.hit_ratio:
        return Excluded.TARGET_OUT_OF_REACH
    if target.ttft_p95_seconds is not None and prefill_share * (1 - most) > 1:
        return Excluded.CANNOT_KEEP_UP
    # sorted by host, then storage: a size is compared with the same host and less storage, and
    # without storage with less host
    key = (candidate.host_gib, candidate.write_policy, candidate.retention)
    if not candidate.storage_gib:
        key = (0.0, candidate.write_policy, candidate.retention)
        smaller = best_smaller.get(key, bound.of_gib(candidate.device_gib))
        if most < smaller + NOTHING_GAINED:
            return Excluded.NOTHING_GAINED
        best_smaller[key] = most
        best_smaller[(candidate.host_gib, candidate.write_policy, candidate.retention)] = most
        return None
    smaller = best_smaller.get(key, 0.0)
    if most < smaller + NOTHING_GAINED:
        return Excluded.NOTHING_GAINED
    best_smaller[key] = most
    return None
