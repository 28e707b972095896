"""SGLang's radix cache on its Rust tree core, timed in its own interpreter for `core_replay.py`.

Started with a Python in which sglang is installed. First a line on stdout names the core, then
every line on stdin (JSON: page_tokens, capacity_tokens) is answered by the timing of one replay, so
that the runs of both sides alternate. The peer gets a slot allocator that only counts, and no calls
for locks: what it leaves out is to its advantage.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from core_replay_loop import Tokens, prompts_of_trace, replay

SLOTS = torch.arange(1 << 18, dtype=torch.int64)
"""Slot numbers; which ones makes no difference to the tree, so every prompt gets the first."""


class CountingAllocator:
    device = "cpu"

    def __init__(self, page_tokens: int) -> None:
        self.page_size = page_tokens
        self.freed_tokens = 0

    def free(self, slots: Any) -> None:
        self.freed_tokens += slots.numel()

    def free_segment(self, slots: Any, start_pos: int = 0, **_: Any) -> None:
        self.freed_tokens += slots.numel()

    def available_size(self) -> int:
        return 0


class RustTree:
    """`core_replay_loop.Adapter` over the peer's cache."""

    self_evicting = False

    def __init__(self, page_tokens: int, capacity_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=CountingAllocator(page_tokens),
                page_size=page_tokens,
                tree_components=(ComponentType.FULL,),
                tree_core_backend="rust",
            )
        )
        self.core_name = type(self._cache.tree_core).__name__

    def prepare(self, tokens: Tokens) -> tuple[array[int], torch.Tensor]:
        key = array("q")
        key.frombytes(tokens.tobytes())
        return key, SLOTS[: len(tokens) // self._page_tokens * self._page_tokens]

    def match(self, key: tuple[array[int], torch.Tensor]) -> int:
        found = self._cache.match_prefix(MatchPrefixParams(key=RadixKey(key[0])))
        return int(found.device_prefix_len)

    def insert(self, key: tuple[array[int], torch.Tensor]) -> None:
        self._cache.insert(InsertParams(key=RadixKey(key[0]), value=key[1]))

    def evict(self, tokens: int) -> None:
        self._cache.evict(EvictParams(num_tokens=tokens))

    def used(self) -> int:
        return int(self._cache.evictable_size() + self._cache.protected_size())


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the peer prints goes to stderr
    prompts = prompts_of_trace(Path(sys.argv[1]), int(sys.argv[2]))
    hello = {"core": RustTree(16, 1 << 20).core_name, "version": version("sglang")}
    print(json.dumps(hello), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        timing, _ = replay(RustTree, prompts, asked["page_tokens"], asked["capacity_tokens"])
        print(json.dumps(timing.to_dict()), file=answers, flush=True)


if __name__ == "__main__":
    main()
