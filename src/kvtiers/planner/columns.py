"""A whole trace as a few flat arrays: what the curve is computed from.

    block_ids   | request 0: head .. tail | request 1: head .. tail | ...
    starts      0                         n0                        n0+n1 ...   (requests + 1)

Owns nothing but the arrays. About 8 bytes per block reference and 40 per request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvtiers.errors import TraceError
from kvtiers.workload import TraceRequest
from kvtiers.workload.request import BlockIds

IntArray = npt.NDArray[np.int64]

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class TraceColumns:
    """The requests of a trace in order of arrival, and the blocks that each of them refers to."""

    block_tokens: int
    starts: IntArray
    block_ids: IntArray
    input_tokens: IntArray
    output_tokens: IntArray
    arrival_seconds: npt.NDArray[np.float64]
    output_starts: IntArray | None = None
    """Where a trace names the blocks that outputs complete: as `starts`, for `output_block_ids`."""
    output_block_ids: IntArray | None = None
    output_tokens_max: IntArray | None = None
    """Where a trace says how many tokens of output were allowed; never below `output_tokens`."""

    @property
    def requests(self) -> int:
        return len(self.input_tokens)

    @property
    def references(self) -> int:
        return len(self.block_ids)

    @cached_property
    def blocks_per_request(self) -> IntArray:
        return np.diff(self.starts)

    @cached_property
    def tokens_of_block(self) -> IntArray:
        """Tokens in each referenced block: `block_tokens`, or what the prompt leaves at its end."""
        tokens = np.full(self.references, self.block_tokens, np.int64)
        some = np.flatnonzero(self.blocks_per_request)
        last = self.starts[some + 1] - 1
        rest = self.input_tokens[some] - self.block_tokens * (self.blocks_per_request[some] - 1)
        tokens[last] = np.minimum(self.block_tokens, rest)
        return tokens

    @cached_property
    def previous(self) -> IntArray:
        """Index of the reference before this one to the same block; -1 where it is the first."""
        return previous_reference(self.block_ids)

    @classmethod
    def load(cls, requests: Iterable[TraceRequest]) -> TraceColumns:
        """All of a trace. Raises `TraceError` where two requests have blocks of another size."""
        ids: list[BlockIds] = []
        blocks: list[int] = []
        inputs: list[int] = []
        outputs: list[int] = []
        arrivals: list[float] = []
        output_ids: list[BlockIds] = []
        allowed: list[int] = []
        block_tokens = 0
        for request in requests:
            if block_tokens not in (0, request.block_tokens):
                raise TraceError(
                    f"request {len(inputs) + 1} has blocks of {request.block_tokens} tokens, those "
                    f"before it of {block_tokens}; a trace has one block size"
                )
            block_tokens = request.block_tokens
            ids.append(request.block_ids)
            blocks.append(len(request.block_ids))
            inputs.append(request.input_tokens)
            outputs.append(request.output_tokens)
            arrivals.append(request.arrival_seconds)
            allowed.append(request.output_tokens_max or request.output_tokens)
            output_ids.append(
                _NONE if request.output_block_ids is None else request.output_block_ids
            )
        if not inputs:
            raise TraceError("the trace holds no request")
        outputs_named = any(len(each) for each in output_ids)
        return cls(
            block_tokens=block_tokens,
            starts=_starts(blocks),
            block_ids=np.concatenate(ids),
            input_tokens=np.array(inputs, np.int64),
            output_tokens=np.array(outputs, np.int64),
            arrival_seconds=np.array(arrivals, np.float64),
            output_starts=_starts([len(e) for e in output_ids]) if outputs_named else None,
            output_block_ids=np.concatenate(output_ids) if outputs_named else None,
            output_tokens_max=np.array(allowed, np.int64) if allowed != outputs else None,
        )

    def require_prefix_ids(self) -> None:
        """Raise `TraceError` unless an id always has the same block before it.

        Ids that name a block's content alone, or that are local to a conversation, would make
        prompts share what they do not have in common.
        """
        before = np.full(self.references, np.iinfo(np.int64).min)
        before[1:] = self.block_ids[:-1]
        heads = self.starts[:-1][self.blocks_per_request > 0]
        before[heads] = np.iinfo(np.int64).min
        again = np.flatnonzero(self.previous >= 0)
        differs = again[before[again] != before[self.previous[again]]]
        if not len(differs):
            return
        first = int(differs[0])
        request = int(np.searchsorted(self.starts, first, "right"))
        raise TraceError(
            f"block id {int(self.block_ids[first])} of request {request} follows another block "
            f"than it did before ({len(differs):,} of {len(again):,} repeated references do); ids "
            "must name a block together with everything before it. If they are unique within a "
            "conversation only, say --local-ids"
        )


def _starts(sizes: list[int]) -> IntArray:
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)


def previous_reference(ids: IntArray) -> IntArray:
    """For each element the index of the last equal element before it, or -1."""
    previous = np.full(len(ids), -1, np.int64)
    order = _stable_order(ids)
    ordered = ids[order]
    same = ordered[1:] == ordered[:-1]
    previous[order[1:][same]] = order[:-1][same]
    return previous


def _stable_order(ids: IntArray) -> IntArray:
    """Indices that sort `ids`, equal ones in order.

    numpy sorts 16-bit numbers in linear time and wider ones not, so this goes digit by digit, the
    lowest first, over as many digits as differ: two for a trace that counts its blocks.
    """
    digits = ids.view(np.uint64)
    order = np.arange(len(ids))
    differing = int(np.bitwise_or.reduce(digits ^ digits[:1], initial=0))
    for shift in range(0, differing.bit_length(), 16):
        digit = (digits >> np.uint64(shift)).astype(np.uint16)
        order = order[np.argsort(digit[order], kind="stable")]
    return order
