"""The curve from a sample of the blocks (SHARDS), for traces too long for the exact one.

A block is in the sample or not by a hash of its id, so that all its references are; a sampled
block then stands for `1 / rate` blocks. In traffic with shared prefixes a few blocks take a large
part of all references, and a sample that happens to hold or miss them is far off. So blocks with
many references are all taken (each standing for itself), and only the others are sampled:

    hits(C) = hits of frequent blocks + (weight of rare blocks) * (hits / weight of those sampled)

The standard error has two parts, added as variances: which rare blocks were sampled (the residuals
of the ratio above, per block), and how far the positions are off (the spread of a sum of sampled
blocks, times the slope of the curve there).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtiers.errors import ConfigError
from kvtiers.planner.columns import IntArray, TraceColumns
from kvtiers.planner.curve import Definition, HitCurve, weights_of
from kvtiers.planner.dominance import FloatArray
from kvtiers.planner.stack_distance import weighted_stack_positions

FREQUENT_REFERENCES_MIN = 8
"""A block with more references than this, and than a sampled one stands for, is always taken."""


@dataclass(frozen=True, eq=False)
class SampledCurve(HitCurve):
    """A curve estimated from a sample; `hits` as in `HitCurve`, and how sure they are."""

    rate: float
    sampled_references: int
    references: int
    _residuals: _Residuals

    def standard_error(self, capacity_blocks: float) -> float:
        """One standard error of `hit_ratio` at this capacity, as a ratio."""
        if self.rate >= 1:
            return 0.0
        capacity = min(capacity_blocks, float(self.saturated_at_blocks))
        sampling = self._residuals.standard_error(capacity) / self.denominator
        # the rare blocks within the capacity are counted by a sample of them, in steps of 1 / rate
        spread = float(np.sqrt(capacity * (1 - self.rate) / self.rate)) + 1 / self.rate
        above, below = self.hit_ratio(capacity + spread), self.hit_ratio(capacity - spread)
        return float(np.hypot(sampling, (above - below) / 2))


def sampled_curve(
    columns: TraceColumns,
    rate: float,
    definition: Definition = Definition.TOKENS,
    seed: int = 0,
) -> SampledCurve:
    """The curve from about `rate` of the rare blocks and all frequent ones, 0 < rate <= 1."""
    if not 0 < rate <= 1:
        raise ConfigError(f"the sampling rate is {rate}; it lies in (0, 1]")
    all_weights, denominator = weights_of(columns, definition)
    frequent = _references_to_same(columns) > max(FREQUENT_REFERENCES_MIN, 1 / rate)
    taken = frequent | (_unit_hash(columns.block_ids, seed) < rate)
    sample = _subset(columns, taken)
    rare = ~frequent[taken]
    weights = all_weights[taken]

    positions = weighted_stack_positions(sample, np.where(rare, 1 / rate, 1.0))
    found = np.isfinite(positions)
    rare_weight = float(all_weights[~frequent].sum())
    sampled_weight = float(weights[rare].sum())
    expansion = rare_weight / sampled_weight if sampled_weight else 0.0
    where = np.ceil(positions[found]).astype(np.int64)
    at = np.bincount(where, weights[found] * np.where(rare, expansion, 1.0)[found], minlength=1)
    return SampledCurve(
        definition=definition,
        denominator=denominator,
        block_tokens=columns.block_tokens,
        hits=np.cumsum(at),
        rate=rate,
        sampled_references=sample.references,
        references=columns.references,
        _residuals=_Residuals.of(sample.block_ids, weights, positions, rare, rate),
    )


@dataclass(frozen=True, eq=False)
class _Residuals:
    """What the sampled rare blocks say about the spread of their total, per capacity."""

    block: IntArray  # dense number of the block, per sampled reference to a rare block
    weight: FloatArray
    position: FloatArray
    weight_of_block: FloatArray
    rate: float

    @classmethod
    def of(
        cls,
        ids: IntArray,
        weights: FloatArray,
        positions: FloatArray,
        rare: npt.NDArray[np.bool_],
        rate: float,
    ) -> _Residuals:
        _, block = np.unique(ids[rare], return_inverse=True)
        per_block: FloatArray = np.bincount(block, weights[rare]).astype(np.float64)
        return cls(block.astype(np.int64), weights[rare], positions[rare], per_block, rate)

    def standard_error(self, capacity_blocks: float) -> float:
        """One standard error of the rare blocks' hits, in the unit of the weights."""
        total = float(self.weight_of_block.sum())
        if not total:
            return 0.0
        hit = np.where(self.position <= capacity_blocks, self.weight, 0.0)
        hits_of_block = np.bincount(self.block, hit, minlength=len(self.weight_of_block))
        ratio = float(hits_of_block.sum()) / total
        residual = hits_of_block - ratio * self.weight_of_block
        return float(np.sqrt((1 - self.rate) * (residual**2).sum())) / self.rate


def _references_to_same(columns: TraceColumns) -> IntArray:
    """Per reference: how many references its block has in the whole trace."""
    first = columns.previous < 0
    # chains of equal blocks: number each block by its first reference, following `previous`
    number = np.where(first, np.cumsum(first) - 1, -1)
    root = np.where(first, np.arange(columns.references), columns.previous)
    while True:
        further = root[root]
        if np.array_equal(further, root):
            break
        root = further
    number = number[root]
    counts: IntArray = np.bincount(number)[number]
    return counts


def _unit_hash(ids: IntArray, seed: int) -> FloatArray:
    """A number in [0, 1) per id: the finaliser of splitmix64."""
    x = ids.astype(np.uint64) + np.uint64((0x9E3779B97F4A7C15 * (seed + 1)) & (2**64 - 1))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) / float(1 << 53)


def _subset(columns: TraceColumns, taken: npt.NDArray[np.bool_]) -> TraceColumns:
    """The same requests with only some of their references."""
    before = np.concatenate(([0], np.cumsum(taken)))
    return TraceColumns(
        block_tokens=columns.block_tokens,
        starts=before[columns.starts],
        block_ids=columns.block_ids[taken],
        input_tokens=columns.input_tokens,
        output_tokens=columns.output_tokens,
        arrival_seconds=columns.arrival_seconds,
    )
