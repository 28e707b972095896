"""Hit ratio against capacity, exactly, for every capacity of an LRU cache with prefix sharing.

One trace has several honest hit ratios; which one is meant is a `Definition`, printed with its
denominator wherever a ratio is printed. What a stack of tiers hits is read off the same curve:

    inclusive   a tier holds what the tiers above hold: together they are as large as the largest
    exclusive   tiers hold distinct blocks: together they are as large as their sum
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kvtiers.planner.columns import TraceColumns
from kvtiers.planner.dominance import FloatArray
from kvtiers.planner.stack_distance import never, stack_positions
from kvtiers.types import Retention, Tier

DEFAULT_CAPACITIES_MIN = 6
"""Fewer points than that do not show the shape of a curve."""
_SERIES = ((1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0))


class Definition(StrEnum):
    """What is divided by what."""

    TOKENS = "tokens"
    BLOCKS = "blocks"
    FULL_BLOCKS = "full-blocks"
    REQUESTS = "requests"

    @property
    def text(self) -> str:
        """The definition in words."""
        return _TEXTS[self]

    @property
    def denominator_name(self) -> str:
        return _DENOMINATORS[self]


_TEXTS = {
    Definition.TOKENS: "tokens of prompts found as a prefix / all prompt tokens",
    Definition.BLOCKS: "blocks found / all blocks of prompts, partial last ones included",
    Definition.FULL_BLOCKS: "blocks found / full blocks (partial ones in the numerator only)",
    Definition.REQUESTS: "mean over requests of (tokens found as a prefix / prompt tokens)",
}
_DENOMINATORS = {
    Definition.TOKENS: "prompt tokens",
    Definition.BLOCKS: "prompt blocks",
    Definition.FULL_BLOCKS: "full prompt blocks",
    Definition.REQUESTS: "requests",
}


@dataclass(frozen=True, eq=False)
class HitCurve:
    """`hits[c]` is the numerator at a capacity of `c` blocks, for 0 <= c < len(hits).

    From the last entry on the curve is flat: more memory cannot find what was never seen.
    """

    definition: Definition
    denominator: int
    block_tokens: int
    hits: FloatArray

    @property
    def saturated_at_blocks(self) -> int:
        """The smallest capacity that hits as often as an unbounded one."""
        return len(self.hits) - 1

    @property
    def ceiling(self) -> float:
        """The hit ratio of an unbounded cache."""
        return self.hit_ratio(math.inf)

    def hit_ratio(self, capacity_blocks: float) -> float:
        """The ratio at a capacity in blocks (fractions of a block hold nothing), `inf` allowed."""
        index = int(min(max(0.0, capacity_blocks), self.saturated_at_blocks))
        return float(self.hits[index]) / self.denominator

    def capacity_for(self, hit_ratio: float) -> int | None:
        """The fewest blocks that reach a ratio; None when no capacity does."""
        needed = hit_ratio * self.denominator
        index = int(np.searchsorted(self.hits, needed - 1e-9 * self.denominator))
        return index if index < len(self.hits) else None


@dataclass(frozen=True, slots=True)
class TierShare:
    """A tier of a given capacity and the share of hits that it adds to those above it."""

    tier: Tier
    capacity_blocks: float
    hit_ratio: float


def exact_curve(columns: TraceColumns, definition: Definition = Definition.TOKENS) -> HitCurve:
    """The exact curve of a trace."""
    return curve_of_positions(columns, stack_positions(columns), definition)


def curve_of_positions(
    columns: TraceColumns, positions: np.ndarray, definition: Definition
) -> HitCurve:
    """The curve of positions that `stack_positions` gave: one pass serves several definitions."""
    weights, denominator = weights_of(columns, definition)
    found = positions < never(columns)
    at = np.bincount(positions[found], weights=weights[found], minlength=1)
    return HitCurve(definition, denominator, columns.block_tokens, np.cumsum(at))


def weights_of(columns: TraceColumns, definition: Definition) -> tuple[FloatArray, int]:
    """What each reference adds to the numerator when it is found, and the denominator.

    The denominator is at least 1, so that a trace without any full block has a curve (of zeros).
    """
    if definition is Definition.TOKENS:
        return columns.tokens_of_block.astype(np.float64), int(columns.input_tokens.sum())
    if definition is Definition.REQUESTS:
        per_request = np.repeat(columns.input_tokens, columns.blocks_per_request)
        return columns.tokens_of_block / per_request, columns.requests
    ones = np.ones(columns.references)
    if definition is Definition.BLOCKS:
        return ones, max(1, columns.references)
    full = int((columns.tokens_of_block == columns.block_tokens).sum())
    return ones, max(1, full)


def tier_shares(
    curve: HitCurve, capacities: Sequence[tuple[Tier, float]], retention: Retention
) -> list[TierShare]:
    """What each tier adds, nearest first; `capacities` in blocks, from the device down."""
    shares = []
    together = above = 0.0
    for tier, capacity in capacities:
        if retention is Retention.EXCLUSIVE:
            together += capacity
        else:
            together = max(together, capacity)
        ratio = curve.hit_ratio(together)
        shares.append(TierShare(tier, capacity, ratio - above))
        above = ratio
    return shares


def default_capacities(curve: HitCurve, units_per_block: float) -> list[float]:
    """Round capacities from where the curve begins to rise to where it ends, and `inf`.

    1, 2, 5, 10, ... of a unit; for a trace so small that few of these lie there, finer steps, or
    each block that the curve has. A curve without hits has `inf` alone.
    """
    least_blocks = max(1, curve.capacity_for(0.02 * curve.ceiling) or 1)
    last_blocks = curve.saturated_at_blocks
    first, last = least_blocks * units_per_block, last_blocks * units_per_block
    for factors in _SERIES:
        steps = _round_steps(factors, first, last)
        if len(steps) >= DEFAULT_CAPACITIES_MIN:
            return [*steps, math.inf]
    step = max(1, (last_blocks - least_blocks) // DEFAULT_CAPACITIES_MIN)
    blocks = range(least_blocks, last_blocks + 1, step)
    return [*(each * units_per_block for each in blocks), math.inf]


def _round_steps(factors: Sequence[float], first: float, last: float) -> list[float]:
    steps: list[float] = []
    exponent = math.floor(math.log10(first))
    while 10.0**exponent <= last:
        steps += [factor * 10.0**exponent for factor in factors]
        exponent += 1
    return [step for step in steps if first <= step <= last]
