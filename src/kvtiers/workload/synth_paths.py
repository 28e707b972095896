"""Block ids for made-up prompts: prefix identity by construction, without any tokens.

A prompt is a sequence of segments (a system prompt, a document, a turn). Two prompts share a block
exactly when all segments up to the end of that block are the same, at the same offsets:

    shared segment   the same for everybody who appends it in the same place (memoised)
    fresh segment    nobody else's: its blocks get new ids

A `PromptPath` is immutable, so a conversation keeps the path of its last turn and goes on from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvtiers.workload.request import BlockIds

_Part: TypeAlias = tuple[int, int, int]
"""What a partial block holds of one segment: (segment, offset in it, tokens)."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptPath:
    """`tokens` of a prompt: ids of its whole blocks, and what its last, partial block holds."""

    tokens: int
    whole_ids: BlockIds
    tail: tuple[_Part, ...]

    @property
    def place(self) -> tuple[int, tuple[_Part, ...]]:
        """Where the next token goes; equal places have equal prefixes."""
        return (int(self.whole_ids[-1]) if len(self.whole_ids) else -1, self.tail)


class PathBook:
    """Hands out block ids, counting from 0. Memory grows with the shared segments only."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.root = PromptPath(0, np.empty(0, np.int64), ())
        self._next_id = 0
        self._next_segment = 0
        self._shared: dict[tuple[int, tuple[_Part, ...], int, int], PromptPath] = {}
        self._shared_tails: dict[tuple[int, tuple[_Part, ...]], int] = {}
        self._public: set[int] = set()

    def new_segment(self) -> int:
        """A segment that may be appended by several prompts."""
        segment = self._segment()
        self._public.add(segment)
        return segment

    def append_shared(self, path: PromptPath, segment: int, tokens: int) -> PromptPath:
        """The path after `tokens` of a shared segment; equal calls give equal ids."""
        key = (*path.place, segment, tokens)
        longer = self._shared.get(key)
        if longer is None:
            longer = self._append(path, segment, tokens)
            if all(part[0] in self._public for part in path.tail):
                self._shared[key] = longer
        return longer

    def append_fresh(self, path: PromptPath, tokens: int) -> PromptPath:
        """The path after `tokens` that no other prompt has."""
        return self._append(path, self._segment(), tokens)

    def prompt_ids(self, path: PromptPath) -> BlockIds:
        """Ids of the prompt's blocks, the last one partial."""
        if not path.tail:
            return path.whole_ids
        if all(part[0] in self._public for part in path.tail):
            tail_id = self._shared_tails.get(path.place)
            if tail_id is None:
                tail_id = self._shared_tails[path.place] = self._take_ids(1)
        else:
            tail_id = self._take_ids(1)
        return np.append(path.whole_ids, tail_id)

    def _append(self, path: PromptPath, segment: int, tokens: int) -> PromptPath:
        length = path.tokens + tokens
        new_blocks = length // self.block_tokens - len(path.whole_ids)
        if not new_blocks:
            return PromptPath(length, path.whole_ids, (*path.tail, (segment, 0, tokens)))
        first = self._take_ids(new_blocks)
        ids = np.concatenate([path.whole_ids, np.arange(first, first + new_blocks)])
        rest = length % self.block_tokens
        return PromptPath(length, ids, ((segment, tokens - rest, rest),) if rest else ())

    def _segment(self) -> int:
        self._next_segment += 1
        return self._next_segment

    def _take_ids(self, count: int) -> int:
        first = self._next_id
        self._next_id += count
        return first
