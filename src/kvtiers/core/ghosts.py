"""What the cache remembers of pages that left their last tier: a digest and a reason each.

From this the miss reasons and regret come. A ghost is looked up only past the match, and the walk
stops at the first page that is none: a parent leaves after its children, so it is forgotten after
them too. Digests are made when a page leaves (run by run, kept on the run) and when a prompt is
looked up past its match, never for what is resident.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from kvtiers.core.tree import DIGEST_BYTES, Run, Tree
from kvtiers.digests import page_digests
from kvtiers.types import LeaveReason, Tier


class Ghost(NamedTuple):
    tier: Tier
    reason: LeaveReason


class Ghosts:
    """An LRU set of at most `capacity` page digests, over all namespaces."""

    def __init__(self, capacity: int, tree: Tree) -> None:
        self.capacity = capacity
        self._tree = tree
        self._entries: OrderedDict[bytes, Ghost] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        self._entries.clear()

    def remember(self, run: Run, first: int, tier: Tier, reason: LeaveReason) -> None:
        """Pages `[first, run.pages)` of `run` leave `tier`, their last, deepest page first."""
        digests = self._run_digests(run)
        ghost = Ghost(tier, reason)
        entries = self._entries
        for page in range(run.pages - 1, first - 1, -1):
            digest = digests[page * DIGEST_BYTES : (page + 1) * DIGEST_BYTES]
            entries[digest] = ghost
            entries.move_to_end(digest)
        while len(entries) > self.capacity:
            entries.popitem(last=False)

    def recall(self, run: Run, key: bytes, first: int, end: int) -> list[Ghost]:
        """The ghosts among pages `[first, end)` of `key`, up to the first page that is not one.

        `run` ends on the key's path at or before page `first`. Ghosts are forgotten by this: a
        page that is asked for again is about to be computed again.
        """
        page_bytes = self._tree.page_bytes
        digest = self._digest_at(run, run.pages)
        if run.end < first:
            skipped = key[run.end * page_bytes : first * page_bytes]
            digest = page_digests(digest, skipped, page_bytes, DIGEST_BYTES)[-DIGEST_BYTES:]
        position, end_byte = first * page_bytes, end * page_bytes
        found: list[Ghost] = []
        stride = 1
        while position < end_byte:
            # Most prompts past their match have no ghost at all: hash one page, then more and more.
            chunk = key[position : min(end_byte, position + stride * page_bytes)]
            digests = page_digests(digest, chunk, page_bytes, DIGEST_BYTES)
            for offset in range(0, len(digests), DIGEST_BYTES):
                digest = digests[offset : offset + DIGEST_BYTES]
                ghost = self._entries.pop(digest, None)
                if ghost is None:
                    return found
                found.append(ghost)
            position += len(chunk)
            stride *= 4
        return found

    def _run_digests(self, run: Run) -> bytes:
        """Digests of all pages of a run, made once and kept until it changes shape."""
        if run.digests is None:
            seed = self._digest_at(run.parent, run.parent.pages)
            page_bytes = self._tree.page_bytes
            run.digests = page_digests(seed, run.key, page_bytes, DIGEST_BYTES)
        return run.digests

    def _digest_at(self, run: Run, pages: int) -> bytes:
        """The digest of the path up to page `pages` of `run`."""
        if run.parent is None:
            return run.key[:DIGEST_BYTES]
        if not pages:
            return self._digest_at(run.parent, run.parent.pages)
        missing = []
        above = run
        while above.parent is not None and above.digests is None:
            missing.append(above)
            above = above.parent
        for each in reversed(missing):
            self._run_digests(each)
        assert run.digests is not None
        return run.digests[(pages - 1) * DIGEST_BYTES : pages * DIGEST_BYTES]
