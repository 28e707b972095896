"""The storage port: what a store of KV pages must do. Errors are outcomes, never lost.

A store is called from worker threads, several at a time; the framework around it
(`runtime.storage_worker`) owns queueing, deadlines, timing and counting, so a store measures
nothing and waits for nobody. It keeps its own books on what it holds: the core's knowledge of
storage is a hint, and a page that has meanwhile gone is simply `MISSING`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtiers.types import FailReason


@dataclass(frozen=True, slots=True)
class PageRef:
    """One page of one path, as storage names it.

    `key` is the chained digest of the full identity and every token up to the end of this page
    (`storage.keys`); `depth` is the page's index on its path and `parent` the key of the page
    before it (empty at depth 0). A store must keep a parent at least as long as its children.
    `identity` is the digest that seeded the chain; a store may record it, to tell an operator what
    it holds, but finds pages by `key` alone.
    """

    key: bytes
    depth: int
    parent: bytes
    identity: bytes = b""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds. `quota_bytes` is 0 for no limit; `used_bytes` includes all overhead."""

    pages: int
    used_bytes: int
    quota_bytes: int
    evicted_pages: int
    integrity_failures: int


class PageStore(Protocol):
    """A store of equal-sized pages. Every method may be called from any thread."""

    name: str

    def exists_prefix(self, refs: Sequence[PageRef]) -> int:
        """How many of `refs`, from the first on without a gap, the store holds."""
        ...

    def read_into(
        self, refs: Sequence[PageRef], buffers: Sequence[memoryview]
    ) -> list[FailReason | None]:
        """Read each page into its buffer (one page of bytes); None means whole and verified.

        On any other outcome the buffer's content is undefined, and never another page's passed off
        as this one: identity, length and checksum are verified on every read.
        """
        ...

    def write_from(
        self, refs: Sequence[PageRef], buffers: Sequence[memoryview]
    ) -> list[FailReason | None]:
        """Write pages, parents first; an existing page counts as written. `QUOTA` when full.

        None means it is readable from now on and survives a SIGKILL of this process.
        """
        ...

    def delete(self, refs: Sequence[PageRef]) -> int:
        """Delete pages; returns how many were there."""
        ...

    def clear(self) -> int:
        """Delete everything; returns how many pages there were."""
        ...

    def stats(self) -> StoreStats: ...

    def close(self) -> None:
        """Make what was acknowledged findable by the next open, and release the store."""
        ...
