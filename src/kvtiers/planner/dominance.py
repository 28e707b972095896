"""Counting earlier, smaller elements of a permutation, for all of its elements at once.

For a permutation `v` and a bound `h[i] <= i` per element,

    count[i] = |{ j < h[i] : v[j] < v[i] }|        (or the sum of their weights)

is computed bit by bit, highest first. At each level the elements lie grouped into nodes of equal
higher bits, within a node in their original order; as `v` is a permutation, the node of a value
begins at that value with its lower bits cleared, so no node needs bookkeeping:

    level 1 of 8 values   | v in 0..3: [0xx] | v in 4..7: [1xx] |
                            split each node by its next bit, stably; an element with bit 1 counts
                            the zeros of its node before its bound, and both halves go on

Every step is a sequential pass over the arrays: O(n log n) work and no random access.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvtiers.planner.columns import IntArray

FloatArray = npt.NDArray[np.float64]
_Element = TypeVar("_Element", bound=np.generic)


def count_earlier_smaller(values: IntArray, bounds: IntArray) -> IntArray:
    """`count[i]` of the module's definition; `values` is a permutation of `range(n)`."""
    size, order, bound = _padded(values, bounds)
    counts: npt.NDArray[np.int32] = np.zeros(size, np.int32)
    for half in _halves(size):
        level = _Level(order, half)
        in_node = level.zeros_before[bound] - (level.node >> 1)
        lower, upper = level.lower, level.upper
        order = _joined(order[lower], order[upper], half)
        counts = _joined(counts[lower], counts[upper] + in_node[upper], half)
        bound = _joined((level.node + in_node)[lower], (bound + half)[upper] - in_node[upper], half)
    return counts[values].astype(np.int64)


def sum_earlier_smaller(values: IntArray, bounds: IntArray, weights: FloatArray) -> FloatArray:
    """As `count_earlier_smaller`, but each counted element j adds `weights[j]`."""
    size, order, bound = _padded(values, bounds)
    weight = np.zeros(size, np.float64)
    weight[: len(weights)] = weights
    sums = np.zeros(size, np.float64)
    weight_before = np.zeros(size + 1)
    for half in _halves(size):
        level = _Level(order, half)
        in_node = level.zeros_before[bound] - (level.node >> 1)
        np.cumsum(np.where(level.zero, weight, 0.0), out=weight_before[1:])
        added = weight_before[bound] - weight_before[level.node]
        lower, upper = level.lower, level.upper
        order = _joined(order[lower], order[upper], half)
        sums = _joined(sums[lower], sums[upper] + added[upper], half)
        weight = _joined(weight[lower], weight[upper], half)
        bound = _joined((level.node + in_node)[lower], (bound + half)[upper] - in_node[upper], half)
    return sums[values]


def _padded(
    values: IntArray, bounds: IntArray
) -> tuple[int, npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Both arrays as int32 (half the memory traffic), lengthened to a power of two.

    The padding holds the largest values at the end, so that nothing real counts it, and every node
    of every level is exactly full.
    """
    count = len(values)
    size = 1 << max(0, count - 1).bit_length()
    order = np.arange(size, dtype=np.int32)
    order[:count] = values
    bound = np.zeros(size, np.int32)
    bound[:count] = bounds
    return size, order, bound


def _halves(size: int) -> list[int]:
    return [1 << level for level in reversed(range(size.bit_length() - 1))]


class _Level:
    """One level: which elements have the bit `half` unset (`lower`) or set (`upper`), how many of
    the former lie before each index, and where each index's node begins."""

    def __init__(self, order: npt.NDArray[np.int32], half: int) -> None:
        size = len(order)
        self.zero = (order & half) == 0
        self.zeros_before = np.zeros(size + 1, np.int32)
        np.cumsum(self.zero, out=self.zeros_before[1:], dtype=np.int32)
        self.lower = np.flatnonzero(self.zero)
        self.upper = np.flatnonzero(~self.zero)
        self.node = np.arange(size, dtype=np.int32) & np.int32(-2 * half)


def _joined(
    lower: npt.NDArray[_Element], upper: npt.NDArray[_Element], half: int
) -> npt.NDArray[_Element]:
    """Each node's lower elements, then its upper ones: as many of each, as nodes are full."""
    both = np.empty((len(lower) // half, 2, half), lower.dtype)
    both[:, 0] = lower.reshape(-1, half)
    both[:, 1] = upper.reshape(-1, half)
    return both.reshape(-1)
