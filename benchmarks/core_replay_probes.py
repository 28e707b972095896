"""Probes of the core beside the replays of `core_replay.py`.

    calls           microseconds of match, admit, commit, finish, ack, fold and evict over the trace
    flat match      the same prompts at the same depth, in a full cache of 1 M and of 20 M tokens
    live leases     eviction with 5,000 leases alive and with none
    long prompt     the match of a fully cached prompt of 100,000 tokens, in one run and in 200
    bytes           of keys and slots per cached page, of a run, of a ghost

Every time is the median of many calls on the thread's own clock where calls are long enough for it,
and on the wall clock where not.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from core_replay_loop import Tokens, replay
from core_replay_ours import NAMESPACE, CallByCall, OneTier, ThreeTiersWithGhosts
from kvtiers.core.cache import UnifiedRadixCache
from kvtiers.core.lease import Lease
from kvtiers.types import TOKEN_BYTES, CacheConfig, SlotArray, Tier

PAGE_TOKENS = 16
SMALL_TOKENS, LARGE_TOKENS = 1_000_000, 20_000_000
PROMPT_TOKENS = 13_504  # the mean of the trace, in whole pages
LONG_PROMPT_TOKENS = 100_000
LONG_PROMPT_RUNS = 200
LIVE_LEASES = 5_000


def run_probes(prompts: list[Tokens], runs: int) -> dict[str, Any]:
    return {
        "calls": calls(prompts, runs),
        "flat_match": flat_match(runs),
        "live_leases": live_leases(runs),
        "long_prompt": long_prompt(runs),
        "bytes": sizes(prompts),
    }


def calls(prompts: list[Tokens], runs: int) -> list[dict[str, Any]]:
    """Microseconds of each call over the trace with three tiers: of the fastest of the runs."""
    rows: list[dict[str, Any]] = []
    for capacity in (SMALL_TOKENS, LARGE_TOKENS):
        best: dict[str, tuple[float, float, int]] = {}
        for _ in range(runs):
            _, adapter = replay(CallByCall, prompts, PAGE_TOKENS, capacity)
            assert isinstance(adapter, CallByCall)
            for call, seconds in adapter.seconds.items():
                figures = (
                    statistics.median(seconds),
                    statistics.quantiles(seconds, n=10)[-1],
                    len(seconds),
                )
                best[call] = min(best.get(call, figures), figures)
            del adapter
        rows.extend(
            {
                "capacity_tokens": capacity,
                "call": call,
                "median_us": median * 1e6,
                "p90_us": p90 * 1e6,
                "calls": count,
            }
            for call, (median, p90, count) in best.items()
        )
    return rows


def flat_match(runs: int) -> dict[str, float]:
    """The match of 64 prompts, three runs deep, in a full cache of 1 M and of 20 M tokens.

    The prompts are evenly spread over either cache, so what differs is the size of the tree, and
    not how much of it the processor's caches hold.
    """
    probed = 64
    caches = []
    for capacity in (SMALL_TOKENS, LARGE_TOKENS):
        cache = _one_tier(capacity // PAGE_TOKENS)
        keys = _family(capacity)
        for key in keys:
            _publish(cache, key)
        caches.append((cache, keys[:: len(keys) // probed][:probed]))
    small, large = _alternate([partial(_match_all, *each) for each in caches], repeat=20 * runs)
    return {
        "small_us": small / probed * 1e6,
        "large_us": large / probed * 1e6,
        "ratio": large / small,
        "matched_pages": caches[1][0].match(caches[1][1][0], NAMESPACE).raw_pages,
    }


def live_leases(runs: int) -> dict[str, float]:
    """Evicting 64 pages, 500 times over, with and without 5,000 leases alive."""
    pages_each, calls_each = 64, 500
    medians: tuple[list[float], list[float]] = ([], [])
    for _ in range(runs):
        for leases, seconds in zip((0, LIVE_LEASES), medians, strict=True):
            cache = _one_tier(LARGE_TOKENS // PAGE_TOKENS)
            rng = np.random.default_rng(7)
            for request in range(leases):
                admitted = cache.admit(request, _random_key(rng, 40 * PAGE_TOKENS), NAMESPACE, 0.0)
                assert isinstance(admitted, Lease)
            for _ in range(calls_each):
                _publish(cache, _random_key(rng, 100 * PAGE_TOKENS))
            gc.collect()
            start = time.thread_time()
            for _ in range(calls_each):
                freed = cache.evict(Tier.DEVICE, pages_each, 0.0)
                assert freed == pages_each
            seconds.append((time.thread_time() - start) / calls_each)
    none, many = (statistics.median(seconds) for seconds in medians)
    return {"without_us": none * 1e6, "with_us": many * 1e6, "ratio": many / none}


def long_prompt(runs: int) -> dict[str, float]:
    """The match of a fully cached 100,000-token prompt in one run, and in 200 of them."""
    rng = np.random.default_rng(11)
    key = _random_key(rng, LONG_PROMPT_TOKENS)
    pages = LONG_PROMPT_TOKENS // PAGE_TOKENS
    whole = _one_tier(2 * pages)
    _publish(whole, key)
    cut = _one_tier(2 * pages)
    _publish(cut, key)
    for end in np.linspace(0, pages, LONG_PROMPT_RUNS + 1, dtype=int)[1:-1]:
        branch = key[: int(end) * PAGE_TOKENS * TOKEN_BYTES] + _random_key(rng, PAGE_TOKENS)
        _publish(cut, branch)
    # Two equal prompts, so that no match is the remembered one of the call before.
    twins = [bytes(bytearray(key)), bytes(bytearray(key))]
    one, many = _alternate(
        [partial(_match_all, whole, twins), partial(_match_all, cut, twins)], repeat=100 * runs
    )
    deepest = cut.state.tree.match(cut.state.tree.root(NAMESPACE), key, len(key)).run
    return {
        "one_run_us": one / 2 * 1e6,
        "many_runs_us": many / 2 * 1e6,
        "runs": len(deepest.path()),
        "matched_pages": cut.match(twins[0], NAMESPACE).raw_pages,
    }


def sizes(prompts: list[Tokens]) -> dict[str, float]:
    """Bytes of what is kept after the trace: three tiers, 1 M tokens, pages of 16, ghosts."""
    _, adapter = replay(ThreeTiersWithGhosts, prompts, PAGE_TOKENS, SMALL_TOKENS)
    assert isinstance(adapter, OneTier)
    state = adapter.cache.state
    runs = list(state.tree.walk())
    cached = sum(run.pages for run in runs)
    sources = {id(run.source): len(run.source) for run in runs}
    keys = sum(sources.values())
    slots = sum(run.device_slots.nbytes + run.host_slots.nbytes for run in runs)
    objects = sum(
        sys.getsizeof(run)
        + sys.getsizeof(run.children)
        + sum(map(sys.getsizeof, run.children))
        + sys.getsizeof(run.source)
        - len(run.source)
        + _header_bytes(run.device_slots)
        + _header_bytes(run.host_slots)
        for run in runs
    )
    ghosts = state.ghosts._table
    return {
        "cached_pages": cached,
        "key_bytes_per_page": keys / cached,
        "slot_bytes_per_page": slots / cached,
        "stack_bytes_per_slot": 4.0,
        "bytes_per_run": objects / len(runs),
        "ghosts": len(ghosts),
        "bytes_per_ghost": sys.getsizeof(ghosts) / len(ghosts),
    }


def _header_bytes(slots: SlotArray) -> int:
    """Size of an array object without the slots, which a view does not own."""
    return sys.getsizeof(slots) - (slots.nbytes if slots.base is None else 0)


def _one_tier(device_pages: int) -> UnifiedRadixCache:
    return UnifiedRadixCache(
        CacheConfig(device_pages=device_pages, page_tokens=PAGE_TOKENS, ghost_pages=0)
    )


def _random_key(rng: np.random.Generator, tokens: int) -> bytes:
    return rng.integers(0, 50_000, tokens, dtype=np.int32).tobytes()


def _family(capacity_tokens: int) -> list[bytes]:
    """Prompts that fill a cache: groups of four share their first quarter, pairs their half."""
    rng = np.random.default_rng(5)
    head, middle = PROMPT_TOKENS // 4 // PAGE_TOKENS * PAGE_TOKENS, PROMPT_TOKENS // 2
    middle = (middle - head) // PAGE_TOKENS * PAGE_TOKENS
    rest = PROMPT_TOKENS - head - middle
    keys: list[bytes] = []
    used = 0
    while used + head + 2 * middle + 4 * rest <= capacity_tokens:
        first = _random_key(rng, head)
        for _ in range(2):
            second = first + _random_key(rng, middle)
            keys.extend(second + _random_key(rng, rest) for _ in range(2))
        used += head + 2 * middle + 4 * rest
    return keys


def _publish(cache: UnifiedRadixCache, key: bytes) -> None:
    lease = cache.admit(0, key, NAMESPACE, 0.0)
    assert isinstance(lease, Lease), lease
    cache.commit(lease, key, len(key) // TOKEN_BYTES, 0.0)
    cache.finish(lease, 0.0)
    cache.take_facts()


def _match_all(cache: UnifiedRadixCache, keys: list[bytes]) -> None:
    for key in keys:
        cache.match(key, NAMESPACE)


def _alternate(works: list[Callable[[], None]], repeat: int) -> list[float]:
    """Median seconds of CPU time of each piece of work, all of them done in turn."""
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(repeat):
        for work, into in zip(works, seconds, strict=True):
            start = time.thread_time()
            work()
            into.append(time.thread_time() - start)
    return [statistics.median(each) for each in seconds]
