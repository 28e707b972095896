"""The core on the public trace: every request's hits, against block LRU written in ten lines.

Each block of a prompt is one page of one token, the last-token rule is off, and a look-up is made
against the state at a request's start. One LRU tier must equal the oracle request by request. Two
inclusive tiers equal the oracle at the larger size. Two exclusive tiers equal it at the sum, but
for a staging allowance: the blocks of the largest prompt, because a request's own pages may be in
both tiers, and a page that comes down is in both until its copy has ended.
"""

import json
import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from kvtiers.core.cache import UnifiedRadixCache
from kvtiers.core.interface import Blocked, Refused
from kvtiers.events import Copy, HiCacheAck
from kvtiers.types import CacheConfig, Namespace, Retention, WritePolicy

_DATA = Path(os.environ.get("KVTIERS_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
TRACE = _DATA / "mooncake_conversation.jsonl"
NAMESPACE = Namespace("trace")
SUB_TRACE_REQUESTS = 1_500
CAPACITIES = {
    1_000: 4.45,
    2_000: 5.43,
    5_000: 11.18,
    10_000: 21.16,
    20_000: 28.78,
    30_000: 32.57,
    50_000: 35.46,
    100_000: 36.37,
}

pytestmark = pytest.mark.skipif(
    not TRACE.exists(), reason=f"the public trace is not at {TRACE} (set KVTIERS_DATA)"
)


@pytest.fixture(scope="module")
def requests() -> list[list[int]]:
    with TRACE.open() as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def lru_hits(requests: list[list[int]], capacity_blocks: int) -> list[int]:
    """Block hits of each request, with blocks touched from tail to head."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = []
    for blocks in requests:
        hits.append(sum(block in cache for block in blocks))
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity_blocks:
            cache.popitem(last=False)
    return hits


def core_hits(requests: list[list[int]], config: CacheConfig) -> list[int]:
    """Block hits of each request, every copy ending in the moment it is ordered."""
    cache = UnifiedRadixCache(config)

    def carry_out() -> bool:
        ordered = False
        while orders := cache.take_orders():
            ordered = True
            for order in orders:
                assert isinstance(order, Copy)
                cache.ack(HiCacheAck(order.op_id, order.pages), 0.0)
        cache.take_facts()
        return ordered

    hits = []
    for number, blocks in enumerate(requests):
        key = np.asarray(blocks, "<i4").tobytes()
        while True:
            lease = cache.admit(number, key, NAMESPACE, 0.0)
            happened = carry_out()
            if not isinstance(lease, Blocked):
                break
            assert happened, "blocked, and nothing in flight"
        assert not isinstance(lease, Refused)
        hits.append(lease.split.device_hit + lease.split.host_hit)
        cache.commit(lease, key, len(blocks), 0.0)
        carry_out()
        cache.finish(lease, 0.0)
    return hits


def config(device: int, host: int = 0, **settings: object) -> CacheConfig:
    defaults = {"page_tokens": 1, "last_token_rule": False, "ghost_pages": 0}
    return CacheConfig(device_pages=device, host_pages=host, **defaults | settings)


EXCLUSIVE = {
    "write_policy": WritePolicy.WRITE_BACK,
    "retention": Retention.EXCLUSIVE,
    "cleaner_low": 0.0,
    "cleaner_high": 0.0,
}


def within_staging(requests: list[list[int]], hits: list[int], capacity: int) -> bool:
    staging = max(map(len, requests))
    low, high = (sum(lru_hits(requests, capacity + d)) for d in (-staging, staging))
    return low <= sum(hits) <= high


# ---- one tier, the whole trace


@pytest.mark.parametrize(("blocks", "percent"), CAPACITIES.items())
def test_one_tier_has_the_known_ratio_and_hits_what_block_lru_hits_request_by_request(
    requests: list[list[int]], blocks: int, percent: float
) -> None:
    total = sum(map(len, requests))
    assert total == 288_500
    hits = core_hits(requests, config(blocks))
    assert round(100 * sum(hits) / total, 2) == percent
    assert hits == lru_hits(requests, blocks)


# ---- two tiers, a part of it


@pytest.mark.parametrize(("device", "host"), [(500, 2_000), (2_000, 2_000), (2_000, 500)])
def test_two_inclusive_tiers_hit_what_the_larger_one_hits(
    requests: list[list[int]], device: int, host: int
) -> None:
    part = requests[:SUB_TRACE_REQUESTS]
    assert core_hits(part, config(device, host)) == lru_hits(part, max(device, host))


@pytest.mark.parametrize(("device", "host"), [(500, 2_000), (1_000, 1_000), (2_000, 500)])
def test_two_exclusive_tiers_hit_what_one_of_their_sum_hits_but_for_staging(
    requests: list[list[int]], device: int, host: int
) -> None:
    part = requests[:SUB_TRACE_REQUESTS]
    assert within_staging(part, core_hits(part, config(device, host, **EXCLUSIVE)), device + host)


# ---- two tiers, the whole trace


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("device", [1_000, 5_000])
@pytest.mark.parametrize("times", [0.5, 1, 4])
def test_the_whole_trace_over_two_tiers(
    requests: list[list[int]], device: int, times: float
) -> None:
    host = int(device * times)
    assert core_hits(requests, config(device, host)) == lru_hits(requests, max(device, host))
    exclusive = core_hits(requests, config(device, host, **EXCLUSIVE))
    assert within_staging(requests, exclusive, device + host)
