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
        zero, zeros_before = _split(order, half)
        node = _node_starts(size, half)
        in_node = zeros_before[bound] - (node >> 1)
        counts = np.where(zero, counts, counts + in_node)
        bound = np.where(zero, node + in_node, bound + half - in_node)
        order = _partition(order, zero, half)
        counts = _partition(counts, zero, half)
        bound = _partition(bound, zero, half)
    return counts[values].astype(np.int64)


def sum_earlier_smaller(values: IntArray, bounds: IntArray, weights: FloatArray) -> FloatArray:
    """As `count_earlier_smaller`, but each counted element j adds `weights[j]`."""
    size, order, bound = _padded(values, bounds)
    weight = np.zeros(size, np.float64)
    weight[: len(weights)] = weights
    sums = np.zeros(size, np.float64)
    for half in _halves(size):
        zero, zeros_before = _split(order, half)
        node = _node_starts(size, half)
        in_node = zeros_before[bound] - (node >> 1)
        weight_before = np.zeros(size + 1)
        np.cumsum(np.where(zero, weight, 0.0), out=weight_before[1:])
        sums = np.where(zero, sums, sums + weight_before[bound] - weight_before[node])
        bound = np.where(zero, node + in_node, bound + half - in_node)
        order = _partition(order, zero, half)
        sums = _partition(sums, zero, half)
        weight = _partition(weight, zero, half)
        bound = _partition(bound, zero, half)
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


def _split(
    order: npt.NDArray[np.int32], half: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int32]]:
    """Which elements have the level's bit unset, and how many of them lie before each index."""
    zero = (order & half) == 0
    before = np.zeros(len(order) + 1, np.int32)
    np.cumsum(zero, out=before[1:], dtype=np.int32)
    return zero, before


def _node_starts(size: int, half: int) -> npt.NDArray[np.int32]:
    return np.arange(size, dtype=np.int32) & np.int32(-2 * half)


def _partition(
    array: npt.NDArray[_Element], zero: npt.NDArray[np.bool_], half: int
) -> npt.NDArray[_Element]:
    """Each node's elements with the bit unset, then those with it set, both in order."""
    lower = array[zero].reshape(-1, half)
    upper = array[~zero].reshape(-1, half)
    return np.concatenate((lower, upper), axis=1).ravel()
