"""What both sides of `core_replay.py` share: the trace as token arrays, and the loop that is timed.

Runs in two interpreters, that of kvtiers and that of the peer, so it needs numpy and nothing else.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS = 512
"""Tokens that one `hash_id` of the trace stands for."""

VOCABULARY_TOKENS = 50_000

Tokens = npt.NDArray[np.int64]


def block_tokens(hash_id: int) -> Tokens:
    """The tokens of one block: a function of its id alone, the same in every process."""
    return np.random.default_rng(hash_id).integers(0, VOCABULARY_TOKENS, BLOCK_TOKENS)


def prompts_of_trace(path: Path, requests: int) -> list[Tokens]:
    """The prompts of the first requests of a trace in Mooncake's format, as int64 tokens."""
    blocks: dict[int, Tokens] = {}
    prompts = []
    with path.open() as lines:
        for _, line in zip(range(requests), lines, strict=False):
            request = json.loads(line)
            for hash_id in request["hash_ids"]:
                if hash_id not in blocks:
                    blocks[hash_id] = block_tokens(hash_id)
            whole = np.concatenate([blocks[each] for each in request["hash_ids"]])
            prompts.append(whole[: request["input_length"]])
    return prompts


class Adapter(Protocol):
    """One cache as the loop sees it. Made anew for every run: `Adapter(page_tokens, capacity)`.

    `prepare` may convert types only; matching, hashing and cutting into pages are timed.
    """

    self_evicting: bool
    """Whether `insert` makes room itself; otherwise the loop calls `evict` first."""

    def prepare(self, tokens: Tokens) -> Any: ...
    def match(self, key: Any) -> int:
        """Tokens of the prompt that are cached."""
        ...

    def insert(self, key: Any) -> None: ...
    def evict(self, tokens: int) -> None: ...
    def used(self) -> int:
        """Tokens that are cached now."""
        ...


@dataclass
class Timing:
    """One replay: seconds of wall and of CPU time, and the share of tokens that were hits."""

    wall_seconds: float
    cpu_seconds: float
    hit_share: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def replay(
    new_adapter: Callable[[int, int], Adapter],
    prompts: list[Tokens],
    page_tokens: int,
    capacity_tokens: int,
) -> tuple[Timing, Adapter]:
    """Match, make room for and insert every prompt of the trace, in order; as fast as it goes."""
    adapter = new_adapter(page_tokens, capacity_tokens)
    keys = [adapter.prepare(prompt) for prompt in prompts]
    whole_pages = [len(prompt) // page_tokens * page_tokens for prompt in prompts]
    hits = 0
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    if adapter.self_evicting:
        for key in keys:
            hits += adapter.match(key)
            adapter.insert(key)
    else:
        for key, tokens in zip(keys, whole_pages, strict=True):
            matched = adapter.match(key)
            hits += matched
            short = adapter.used() + tokens - matched - capacity_tokens
            if short > 0:
                adapter.evict(short)
            adapter.insert(key)
    cpu = time.process_time() - cpu
    wall = time.perf_counter() - wall
    return Timing(wall, cpu, hits / sum(map(len, prompts))), adapter
