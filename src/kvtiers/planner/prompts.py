"""From block ids to token keys, so that the real cache can be driven by a trace without text.

The tokens of a block are its id over and over (as a dense int32), so two prompts have equal tokens
exactly where they have equal ids. Nothing else about the tokens matters to the cache.

    logical replay   one token per block                key = ids of the prompt
    full replay      `block_tokens` tokens per block    key = each id repeated, cut to the prompt

Output tokens follow the same rule where the trace names the blocks that prompt and output fill
together; elsewhere they are one filler per request, which no other request has.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtiers.errors import TraceError
from kvtiers.planner.columns import TraceColumns

Tokens = npt.NDArray[np.int32]

_FILLER_FROM = 1 << 30
END_TOKEN = (1 << 31) - 1
"""Ends an answer before its client's limit; no block and no filler has this token."""


class PromptKeys:
    """Keys of a trace's requests, by number from 0. Needs 4 bytes per block reference."""

    def __init__(self, columns: TraceColumns) -> None:
        ids = columns.block_ids
        if columns.output_block_ids is not None:
            ids = np.concatenate((ids, columns.output_block_ids))
        distinct, dense = np.unique(ids, return_inverse=True)
        if len(distinct) >= _FILLER_FROM or columns.requests >= _FILLER_FROM:
            raise TraceError(
                f"{len(distinct):,} distinct blocks in {columns.requests:,} requests are more than "
                f"the {_FILLER_FROM:,} that token ids can tell apart"
            )
        self._columns = columns
        self._prompt_ids: Tokens = dense[: columns.references].astype(np.int32)
        self._output_ids: Tokens = dense[columns.references :].astype(np.int32)

    def logical(self, request: int) -> bytes:
        """The prompt with one token per block, the partial last one included."""
        return self._blocks(request).tobytes()

    def prompt(self, request: int) -> bytes:
        """The prompt, every token of it, as the cache's key."""
        prompt = int(self._columns.input_tokens[request])
        if self._columns.output_starts is not None:
            return self.sequence(request)[:prompt].tobytes()
        named = np.repeat(self._blocks(request), self._columns.block_tokens)
        if len(named) < prompt:
            return self.sequence(request)[:prompt].tobytes()
        return named[:prompt].tobytes()

    def output(self, request: int) -> list[int]:
        """The tokens of the answer; an output of no token gets one, which ends it."""
        tokens: list[int]
        if self._columns.output_starts is not None:
            prompt = int(self._columns.input_tokens[request])
            tokens = self.sequence(request)[prompt:].tolist()
        else:
            tokens = [_FILLER_FROM + request] * self.output_tokens(request)
        if len(tokens) < self.output_tokens_max(request):
            tokens[-1] = END_TOKEN  # the last token of an answer is never in the cache
        return tokens

    def output_tokens(self, request: int) -> int:
        """How many tokens the answer has: at least one."""
        return max(1, int(self._columns.output_tokens[request]))

    def output_tokens_max(self, request: int) -> int:
        """How many tokens the answer might have had: at least as many as it has."""
        tokens = self.output_tokens(request)
        allowed = self._columns.output_tokens_max
        return tokens if allowed is None else max(tokens, int(allowed[request]))

    def sequence(self, request: int) -> Tokens:
        """Every token of prompt and output."""
        columns = self._columns
        size = columns.block_tokens
        prompt = int(columns.input_tokens[request])
        length = prompt + self.output_tokens(request)
        blocks = self._blocks(request)
        if columns.output_starts is not None:
            first, last = columns.output_starts[request : request + 2]
            if last > first:
                # the block that the prompt begins and the output fills goes by its final name
                blocks = np.concatenate((blocks[: prompt // size], self._output_ids[first:last]))
        tokens = np.full(length, _FILLER_FROM + request, np.int32)
        named = np.repeat(blocks, size)[:length]
        if columns.output_starts is None:
            named = named[:prompt]
        tokens[: len(named)] = named
        return tokens

    def _blocks(self, request: int) -> Tokens:
        starts = self._columns.starts
        return self._prompt_ids[starts[request] : starts[request + 1]]
