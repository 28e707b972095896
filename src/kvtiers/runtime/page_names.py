"""The storage names of pages, for every pool of a page, hashed off the step loop and once.

Owns: a short memory of the paths that were hashed last, because a path comes by several times: to
be looked up, fetched in batches, and stored as it grows. Nothing else is remembered: a namespace
has the client's salt in it, so there is no end to them. Must not know: stores, or what a page
holds. Safe to use from several threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from kvtiers.storage.keys import PathDigests, StorageIdentity
from kvtiers.storage.port import PageRef
from kvtiers.types import Namespace, PoolSpec

PATHS_KEPT = 64

_Owner: TypeAlias = tuple[bytes, str]
"""The digest of the namespace, and the pool: what tells two paths of the same tokens apart."""


class PageNames:
    """Names the pages of paths in the given pools; `layout` and `shard` as in `StorageIdentity`."""

    def __init__(
        self, pools: Sequence[PoolSpec], page_tokens: int, layout: str, shard: str = "0/1"
    ) -> None:
        self._pools = {pool.name: pool for pool in pools}
        self._page_tokens = page_tokens
        self._layout = layout
        self._shard = shard
        self._recent: deque[tuple[_Owner, bytes, PathDigests]] = deque(maxlen=PATHS_KEPT)
        self._lock = threading.Lock()

    def refs(
        self, pool: str, namespace: Namespace, path_key: bytes, first_page: int, pages: int
    ) -> list[PageRef]:
        """References to pages `[first_page, first_page + pages)` of a path in one pool."""
        with self._lock:
            digests = self._digests(namespace, pool, path_key)
        return digests.refs(first_page, pages)

    def _digests(self, namespace: Namespace, pool: str, path_key: bytes) -> PathDigests:
        # Newest first. Two paths differ within the first bytes or share a prefix, which is what
        # we look for, so a comparison is short or worth its while.
        asked = (namespace.digest, pool)
        for index, (owner, known, digests) in enumerate(self._recent):
            if owner != asked:
                continue
            if known.startswith(path_key):
                return digests
            if path_key.startswith(known):
                digests.extend(path_key)
                self._recent[index] = (owner, path_key, digests)
                return digests
        digests = PathDigests(self._identity(namespace, pool), path_key)
        self._recent.appendleft((asked, path_key, digests))
        return digests

    def _identity(self, namespace: Namespace, pool: str) -> StorageIdentity:
        return StorageIdentity(
            namespace,
            self._page_tokens,
            self._pools[pool].bytes_per_slot,
            self._layout,
            pool,
            self._shard,
        )
