"""The storage tier: pages that outlive host memory and this process.

`port` is what a store must do, `keys` how pages are named, `file` and `memory` are stores, `stores`
opens them by name. A store moves and verifies bytes; queueing, deadlines, timing and counting are
the framework's around it.
"""

from kvtiers.storage.file import FileStore
from kvtiers.storage.keys import PathDigests, StorageIdentity, page_refs
from kvtiers.storage.memory import MemoryStore
from kvtiers.storage.port import PageRef, PageStore, StoreStats
from kvtiers.storage.stores import known_stores, open_store, register_store

__all__ = [
    "FileStore",
    "MemoryStore",
    "PageRef",
    "PageStore",
    "PathDigests",
    "StorageIdentity",
    "StoreStats",
    "known_stores",
    "open_store",
    "page_refs",
    "register_store",
]
