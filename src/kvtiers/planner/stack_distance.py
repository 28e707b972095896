"""Mattson's stack: where in an LRU cache of unbounded size each referenced block stands.

A block at position `k` is found by every LRU cache of at least `k` blocks, so one pass answers
for all capacities. Two rules make it the cache of a server with prefix sharing:

* *Request-atomic*: all blocks of a prompt are looked up in the state at the request's start.
* *Tail to head*: a request touches its last block first, its first block last, so that a block is
  always more recent than those after it and eviction takes tails before heads.

With touches numbered in that order and `prev(j)` the touch before `j` of the same block, the
blocks above a block last touched at `p`, at a request whose touches start at `s`, are

    |{ j < s : prev(j) <= p }| - (p + 1)        all touches up to p are counted, and taken away

where first touches (`prev = -1`) are a prefix sum and the others a dominance count.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from kvtiers.planner.columns import IntArray, TraceColumns
from kvtiers.planner.dominance import FloatArray, count_earlier_smaller, sum_earlier_smaller

_Array = TypeVar("_Array", IntArray, FloatArray)


def never(columns: TraceColumns) -> int:
    """The position that stands for a block which no cache can hold: it was not seen before."""
    return columns.references + 1


def stack_positions(columns: TraceColumns) -> IntArray:
    """Position (from 1) of every referenced block in the LRU stack at its request's start.

    `never(columns)` where it is not in the stack. Within a prompt positions do not fall: a block
    is usable only with all blocks before it.
    """
    touches = _Touches(columns)
    count = count_earlier_smaller(touches.ranks, touches.bounds)
    above = touches.first_before[touches.request_start] + count - (touches.last + 1)
    return _as_prefixes(columns, touches.references, above + 1, never(columns))


def weighted_stack_positions(columns: TraceColumns, weights: FloatArray) -> FloatArray:
    """As `stack_positions`, where a block stands for `weights` blocks (a sample of a trace).

    `weights` is given per reference and must be the same for all references to a block. Where a
    block was not seen before, its position is infinite.
    """
    touches = _Touches(columns)
    by_touch = weights[touches.flipped]
    before = np.concatenate(([0.0], np.cumsum(by_touch)))
    is_first = touches.previous_touch < 0
    first_before = np.concatenate(([0.0], np.cumsum(np.where(is_first, by_touch, 0.0))))
    counted = sum_earlier_smaller(touches.ranks, touches.bounds, by_touch[touches.again])
    above = first_before[touches.request_start] + counted - before[touches.last + 1]
    cold = float(before[-1]) + 1.0
    positions: FloatArray = _as_prefixes(columns, touches.references, above + 1.0, cold)
    positions[positions > cold - 0.5] = np.inf
    return positions


class _Touches:
    """The touches of a trace in order, and what the counting formula needs of the repeated ones.

    flipped         touch number <-> index of the reference (its own inverse)
    previous_touch  per touch: the touch before of the same block, or -1
    again           touch numbers of repeated touches, in order; the arrays below belong to them
    references      their references; `last` their previous touch; `ranks` its rank among all
    request_start   first touch of their request; `bounds` the repeated touches before that
    first_before    per touch number: first touches before it
    """

    def __init__(self, columns: TraceColumns) -> None:
        sizes = columns.blocks_per_request
        count = columns.references
        ends = np.repeat(columns.starts[:-1] + columns.starts[1:] - 1, sizes)
        self.flipped = ends - np.arange(count)
        previous = columns.previous[self.flipped]
        self.previous_touch = np.where(previous >= 0, self.flipped[previous], -1)

        repeated = self.previous_touch >= 0
        self.again = np.flatnonzero(repeated)
        self.references = self.flipped[self.again]
        self.last = self.previous_touch[self.again]
        starts = np.repeat(columns.starts[:-1], sizes)
        self.request_start = starts[self.again]
        repeated_before = np.concatenate(([0], np.cumsum(repeated)))
        self.bounds = repeated_before[self.request_start]
        self.first_before = np.arange(count + 1) - repeated_before

        is_last = np.zeros(count, np.int64)
        is_last[self.last] = 1
        self.ranks = (np.cumsum(is_last) - 1)[self.last]


def _as_prefixes(columns: TraceColumns, references: IntArray, found: _Array, cold: float) -> _Array:
    """Positions of all references from those of the repeated ones, made monotone per prompt.

    `cold` is above every position and stands for the references that are not repeated.
    """
    positions = np.full(columns.references, cold, found.dtype)
    positions[references] = np.minimum(found, cold)
    # one running maximum over all prompts: each is lifted above everything in the one before it
    order = np.repeat(np.arange(columns.requests), columns.blocks_per_request)
    lift = (order * cold).astype(found.dtype)
    positions += lift
    np.maximum.accumulate(positions, out=positions)
    positions -= lift
    return positions
