"""The cache of kvtiers as `core_replay.py` drives it: device only, or three tiers and instant acks.

Leases, slots and the ledger are always on; the facts of a request are folded when it has ended.
"""

from __future__ import annotations

from collections import defaultdict
from time import perf_counter
from typing import cast

import numpy as np

from core_replay_loop import Tokens
from kvtiers.core.cache import UnifiedRadixCache
from kvtiers.core.interface import Blocked
from kvtiers.core.lease import Lease
from kvtiers.events import Copy, HiCacheAck
from kvtiers.metrics.ledger import Ledger
from kvtiers.types import TOKEN_BYTES, CacheConfig, Namespace, Tier

NAMESPACE = Namespace("benchmark")
HOST_TIMES_DEVICE = 4


class OneTier:
    """`core_replay_loop.Adapter` over a cache without host: match, then admit to finish."""

    self_evicting = True
    host_times_device = 0
    ghosts = False

    def __init__(self, page_tokens: int, capacity_tokens: int) -> None:
        device_pages = capacity_tokens // page_tokens
        self.config = CacheConfig(
            device_pages=device_pages,
            host_pages=device_pages * self.host_times_device,
            page_tokens=page_tokens,
            ghost_pages=None if self.ghosts else 0,
        )
        self.cache = UnifiedRadixCache(self.config)
        self.ledger = Ledger(
            page_tokens, self.config.pools, self.config.device_pages, self.config.host_pages
        )
        self.requests = 0

    def prepare(self, tokens: Tokens) -> bytes:
        return tokens.astype(np.int32).tobytes()

    def match(self, key: bytes) -> int:
        return self.cache.match(key, NAMESPACE).usable_pages * self.config.page_tokens

    def insert(self, key: bytes) -> None:
        cache = self.cache
        self.requests += 1
        lease = cache.admit(self.requests, key, NAMESPACE, 0.0)
        assert isinstance(lease, Lease), lease
        cache.commit(lease, key, len(key) // TOKEN_BYTES, 0.0)
        cache.finish(lease, 0.0)
        self.ledger.fold(cache.take_facts())

    def evict(self, tokens: int) -> None:
        self.cache.evict(Tier.DEVICE, -(-tokens // self.config.page_tokens), 0.0)

    def used(self) -> int:
        state = self.cache.state
        return (state.device.capacity - state.device.free) * self.config.page_tokens

    def shape(self) -> dict[str, float]:
        """What the tree looks like now."""
        runs = list(self.cache.state.tree.walk())
        pages = sum(run.pages for run in runs)
        return {"cached_pages": pages, "runs_per_1000_pages": len(runs) / pages * 1000}


class OneTierWithGhosts(OneTier):
    ghosts = True


class ThreeTiers(OneTier):
    """Write-through to a host of four times the device; every copy succeeds at once."""

    host_times_device = HOST_TIMES_DEVICE

    def insert(self, key: bytes) -> None:
        cache = self.cache
        self.requests += 1
        lease = cache.admit(self.requests, key, NAMESPACE, 0.0)
        self._acknowledge()
        while isinstance(lease, Blocked):
            lease = cache.admit(self.requests, key, NAMESPACE, 0.0)
            self._acknowledge()
        assert isinstance(lease, Lease), lease
        cache.commit(lease, key, len(key) // TOKEN_BYTES, 0.0)
        self._acknowledge()
        cache.finish(lease, 0.0)
        self.ledger.fold(cache.take_facts())

    def _acknowledge(self) -> None:
        ack = self.cache.ack
        for copy in cast("list[Copy]", self.cache.take_orders()):  # no storage, so nothing else
            ack(HiCacheAck(copy.op_id, copy.pages), 0.0)


class ThreeTiersWithGhosts(ThreeTiers):
    ghosts = True


class CallByCall(ThreeTiers):
    """Three tiers, every call timed on its own; eviction is called for before the admission."""

    def __init__(self, page_tokens: int, capacity_tokens: int) -> None:
        super().__init__(page_tokens, capacity_tokens)
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def match(self, key: bytes) -> int:
        start = perf_counter()
        matched = self.cache.match(key, NAMESPACE)
        self.seconds["match"].append(perf_counter() - start)
        needed_pages = -(-len(key) // (TOKEN_BYTES * self.config.page_tokens))
        missing = needed_pages - matched.device_pages - self.cache.state.device.free
        if missing > 0:
            start = perf_counter()
            self.cache.evict(Tier.DEVICE, missing, 0.0)
            self.seconds["evict"].append(perf_counter() - start)
        return matched.usable_pages * self.config.page_tokens

    def insert(self, key: bytes) -> None:
        cache, seconds = self.cache, self.seconds
        self.requests += 1
        start = perf_counter()
        lease = cache.admit(self.requests, key, NAMESPACE, 0.0)
        seconds["admit"].append(perf_counter() - start)
        self._acknowledge()
        assert isinstance(lease, Lease), lease
        start = perf_counter()
        cache.commit(lease, key, len(key) // TOKEN_BYTES, 0.0)
        seconds["commit"].append(perf_counter() - start)
        self._acknowledge()
        start = perf_counter()
        cache.finish(lease, 0.0)
        seconds["finish"].append(perf_counter() - start)
        facts = cache.take_facts()
        start = perf_counter()
        self.ledger.fold(facts)
        seconds["fold"].append(perf_counter() - start)

    def _acknowledge(self) -> None:
        cache = self.cache
        for order in cache.take_orders():
            assert isinstance(order, Copy)
            start = perf_counter()
            cache.ack(HiCacheAck(order.op_id, order.pages), 0.0)
            self.seconds["ack"].append(perf_counter() - start)
