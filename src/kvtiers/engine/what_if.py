"""What each tier would find if it were half, twice or four times as large: the live curve.

Owns twelve small imagined caches, at most, that see a sample of the pages that requests ask for. It
answers the question "what would another 100 GiB buy?" while the server runs; the planner answers it
in full, from a recorded trace. Nothing here touches the cache or its books.

An imagined cache of C pages is a table of the digests last used, most recent first. One too large
for that keeps the share R of all pages, chosen by their digest, in a table of R x C (a miniature
simulation: Waldspurger et al., "Cache Modeling and Optimization using Miniature Simulations",
USENIX ATC 2017). A prompt's pages are looked up from its head to the first that is missing and then
used from tail to head, so no page outlives those before it, as in the real tree.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvtiers.core.ghost_table import DIGEST_BYTES, ghost_table
from kvtiers.digests import page_digests
from kvtiers.metrics.gauges import WhatIfRatios, WhatIfSize
from kvtiers.types import TOKEN_BYTES, Namespace, Retention, Tier

SAMPLED_PAGES_MAX = 8192
"""Pages of an imagined cache of any size: its error is about one over the root of this, or 1 %."""

HALF_LIFE_REQUESTS = 1000
"""After so many further requests, one counts half: the curve follows the traffic."""


class _ImaginedCache:
    """An LRU cache of `capacity_pages`, of which at most `sampled_pages_max` are kept."""

    def __init__(self, capacity_pages: int, sampled_pages_max: int) -> None:
        sampled = min(capacity_pages, sampled_pages_max)
        self._threshold = round(sampled / max(1, capacity_pages) * 2**32)
        self._table = ghost_table(sampled)
        self._asked = 0.0
        self._found = 0.0

    def ask(self, digests: bytes, asked_share: float, keep: float) -> None:
        """A prompt's pages, which make up `asked_share` of its tokens."""
        sampled = self._sampled(digests)
        found = len(self._table.take(sampled))
        self._table.remember(sampled, 0, 0)
        # Whether a page that everybody asks for is in the sample decides much, and it is found
        # nearly always: pages that a fair sample would have more of than this one count as found
        # (the adjustment of Waldspurger et al., "SHARDS", USENIX FAST 2015).
        fair = len(digests) / DIGEST_BYTES * self._threshold / 2**32
        found_fairly = found + fair - len(sampled) / DIGEST_BYTES
        self._asked = self._asked * keep + fair / asked_share
        self._found = self._found * keep + found_fairly

    def use(self, digests: bytes) -> None:
        self._table.remember(self._sampled(digests), 0, 0)

    @property
    def hit_ratio(self) -> float:
        return min(1.0, max(0.0, self._found / self._asked)) if self._asked else 0.0

    def _sampled(self, digests: bytes) -> bytes:
        if self._threshold >= 2**32:
            return digests
        # Not the bytes by which the table spreads its entries: those are to stay uniform.
        chance = np.frombuffer(digests, "<u4")[3 :: DIGEST_BYTES // 4]
        whole = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)
        return whole[chance < self._threshold].tobytes()


class WhatIf:
    """The hit ratio of each tier's imagined sizes, over about the last thousand requests.

    A tier's ratio is the share of prompt tokens found in it *or above it*. Sizes are pages; a tier
    of none is left out. Inclusive tiers hold together as much as the largest of them, exclusive
    ones as device and host together.
    """

    def __init__(
        self,
        page_tokens: int,
        capacities: Mapping[Tier, int],
        retention: Retention,
        *,
        sampled_pages_max: int = SAMPLED_PAGES_MAX,
        half_life_requests: float = HALF_LIFE_REQUESTS,
    ) -> None:
        self._page_bytes = page_tokens * TOKEN_BYTES
        self._keep = 0.5 ** (1 / half_life_requests)
        self._caches: dict[int, _ImaginedCache] = {}
        self._by_size: dict[tuple[Tier, WhatIfSize], _ImaginedCache] = {}
        for tier in (tier for tier in Tier if capacities.get(tier)):
            for size in WhatIfSize:
                pages = _together(capacities, tier, size.factor, retention)
                cache = self._caches.setdefault(pages, _ImaginedCache(pages, sampled_pages_max))
                self._by_size[tier, size] = cache

    def ask(self, key: bytes, namespace: Namespace) -> None:
        """A request arrived with this prompt: look it up in every size, then it is there."""
        whole_bytes = len(key) // self._page_bytes * self._page_bytes
        if not whole_bytes:
            # Nothing of it can ever be found, and its tokens are asked for all the same; what one
            # short prompt weighs beside others is less than what sampling gets wrong.
            return
        digests = self._digests(key, namespace)
        for cache in self._caches.values():
            cache.ask(digests, whole_bytes / len(key), self._keep)

    def use(self, key: bytes, namespace: Namespace) -> None:
        """A request ended with this prompt and answer: all of it is the latest that was used."""
        digests = self._digests(key, namespace)
        for cache in self._caches.values():
            cache.use(digests)

    def ratios(self) -> WhatIfRatios:
        """Hit ratio of each tier and size, 0 to 1."""
        return {size: cache.hit_ratio for size, cache in self._by_size.items()}

    def _digests(self, key: bytes, namespace: Namespace) -> bytes:
        return page_digests(namespace.digest, key, self._page_bytes, DIGEST_BYTES)


def _together(
    capacities: Mapping[Tier, int], tier: Tier, factor: float, retention: Retention
) -> int:
    """Different pages that the tiers down to `tier` hold, were it `factor` times as large."""
    pages = {each: capacities.get(each, 0) for each in Tier}
    pages[tier] = max(1, round(pages[tier] * factor))
    device, host, storage = pages[Tier.DEVICE], pages[Tier.HOST], pages[Tier.STORAGE]
    if tier is Tier.DEVICE:
        return device
    memory = device + host if retention is Retention.EXCLUSIVE else max(device, host)
    return memory if tier is Tier.HOST else max(memory, storage)
