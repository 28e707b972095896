"""A store in this process's memory: the `memory` store, for tests and for trying things out.

Same books and same promises as the `file` store, except that nothing outlives the process.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvtiers.errors import ConfigError
from kvtiers.storage.buffers import check_buffers
from kvtiers.storage.index import PageIndex
from kvtiers.storage.port import PageRef, StoreStats
from kvtiers.types import FailReason


class MemoryStore:
    """Pages as bytes objects under a quota (0: no limit); evicts tails before heads."""

    name = "memory"

    def __init__(self, page_bytes: int, quota_bytes: int = 0) -> None:
        if page_bytes < 1 or (quota_bytes and quota_bytes < page_bytes):
            raise ConfigError(
                f"a memory store of {quota_bytes} bytes cannot hold a page of {page_bytes} bytes; "
                "raise the quota, or use 0 for no limit"
            )
        self.page_bytes = page_bytes
        self._quota_bytes = quota_bytes
        self._index: PageIndex[bytes] = PageIndex()
        self._lock = threading.Lock()
        self._evicted_pages = 0
        self._closed = False

    def exists_prefix(self, refs: Sequence[PageRef]) -> int:
        held = self._index.pages
        for pages, ref in enumerate(refs):
            if ref.key not in held:
                return pages
        return len(refs)

    def read_into(
        self, refs: Sequence[PageRef], buffers: Sequence[memoryview]
    ) -> list[FailReason | None]:
        check_buffers(refs, buffers, self.page_bytes)
        return [self._read(ref, buffer) for ref, buffer in zip(refs, buffers, strict=True)]

    def write_from(
        self, refs: Sequence[PageRef], buffers: Sequence[memoryview]
    ) -> list[FailReason | None]:
        check_buffers(refs, buffers, self.page_bytes)
        return [self._write(ref, buffer) for ref, buffer in zip(refs, buffers, strict=True)]

    def delete(self, refs: Sequence[PageRef]) -> int:
        deleted = 0
        with self._lock:
            for ref in refs:
                entry = self._index.pages.get(ref.key)
                if entry is not None:
                    self._index.remove(entry)
                    deleted += 1
        return deleted

    def clear(self) -> int:
        with self._lock:
            deleted = len(self._index)
            self._index = PageIndex()
        return deleted

    def stats(self) -> StoreStats:
        with self._lock:
            pages = len(self._index)
            return StoreStats(
                pages, pages * self.page_bytes, self._quota_bytes, self._evicted_pages, 0
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._index = PageIndex()

    def _read(self, ref: PageRef, buffer: memoryview) -> FailReason | None:
        with self._lock:
            if self._closed:
                return FailReason.SHUTDOWN
            entry = self._index.pages.get(ref.key)
            if entry is None:
                return FailReason.MISSING
            self._index.touch(entry)
            payload = entry.place
        buffer.cast("B")[:] = payload
        return None

    def _write(self, ref: PageRef, buffer: memoryview) -> FailReason | None:
        payload = bytes(buffer)
        with self._lock:
            if self._closed:
                return FailReason.SHUTDOWN
            entry = self._index.pages.get(ref.key)
            if entry is not None:
                self._index.touch(entry)
                return None
            if ref.depth and ref.parent not in self._index.pages:
                return FailReason.ORPHANED
            self._index.begin_write(ref)  # so that making room cannot take the parent
            try:
                if not self._make_room():
                    return FailReason.QUOTA
                self._index.add(ref, payload)
                return None
            finally:
                self._index.end_write(ref)

    def _make_room(self) -> bool:
        if not self._quota_bytes:
            return True
        while (len(self._index) + 1) * self.page_bytes > self._quota_bytes:
            if self._index.take_victim() is None:
                return False
            self._evicted_pages += 1
        return True
