"""What the cache remembers of pages that left their last tier: a digest and a reason each.

From this the miss reasons and regret come. A ghost is looked up only past the match, and the walk
stops at the first page that is none: a parent leaves after its children, so it is forgotten after
them too. Digests are made when a page leaves (run by run, kept on the run) and when a prompt is
looked up past its match, never for what is resident.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from kvtiers.core.ghost_table import DIGEST_BYTES, ghost_table
from kvtiers.core.tree import Run, Tree
from kvtiers.digests import page_digests
from kvtiers.types import LeaveReason, Tier


class Ghost(NamedTuple):
    tier: Tier
    reason: LeaveReason


_GHOSTS = tuple(Ghost(tier, reason) for tier, reason in product(Tier, LeaveReason))
_MEANING = {ghost: meaning for meaning, ghost in enumerate(_GHOSTS)}
"""A table keeps a byte per digest: the place of its ghost in `_GHOSTS`."""


class Ghosts:
    """An LRU set of at most `capacity` page digests, over all namespaces."""

    def __init__(self, capacity: int, tree: Tree) -> None:
        self.capacity = capacity
        self._tree = tree
        self._table = ghost_table(capacity)

    def __len__(self) -> int:
        return len(self._table)

    def clear(self) -> None:
        self._table.clear()

    def remember(self, run: Run, first: int, tier: Tier, reason: LeaveReason) -> None:
        """Pages `[first, run.pages)` of `run` leave `tier`, their last, deepest page first."""
        # A tuple equals and hashes like the named tuple, and is made in a third of the time.
        meaning = _MEANING[tier, reason]  # type: ignore[index]
        self._table.remember(self._run_digests(run), first, meaning)

    def recall(self, run: Run, key: bytes, first: int, end: int) -> dict[Ghost, int]:
        """Pages of each ghost among `[first, end)` of `key`, up to the first page that is none.

        `run` ends on the key's path at or before page `first`. Ghosts are forgotten by this: a
        page that is asked for again is about to be computed again.
        """
        page_bytes = self._tree.page_bytes
        digest = self._digest_at(run, run.pages)
        if run.end < first:
            skipped = key[run.end * page_bytes : first * page_bytes]
            digest = page_digests(digest, skipped, page_bytes, DIGEST_BYTES)[-DIGEST_BYTES:]
        position, end_byte = first * page_bytes, end * page_bytes
        found = b""
        stride = 1
        while position < end_byte:
            # Most prompts past their match have no ghost at all: hash one page, then more and more.
            chunk = key[position : min(end_byte, position + stride * page_bytes)]
            digests = page_digests(digest, chunk, page_bytes, DIGEST_BYTES)
            taken = self._table.take(digests)
            found += taken
            if len(taken) * DIGEST_BYTES < len(digests):
                break
            digest = digests[-DIGEST_BYTES:]
            position += len(chunk)
            stride *= 4
        return {_GHOSTS[meaning]: found.count(meaning) for meaning in dict.fromkeys(found)}

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
