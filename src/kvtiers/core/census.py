"""Counts that no book keeps, taken by walking the tree a slice at a time.

Owns one walk under way and the counts of the last one that ended: pages that are on host and on
device both, and pages by namespace. A walk over 100,000 runs takes 40 ms and would be a hole
between two tokens; so each call looks at a bounded number of runs. What changes under a walk may be
missed by it or counted as it was: these are gauges, and take part in no identity.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from kvtiers.types import NAMESPACES_SHOWN, OTHER_NAMESPACES, Namespace, Tier

if TYPE_CHECKING:
    from kvtiers.core.state import CacheState
    from kvtiers.core.tree import Run

RUNS_PER_SLICE = 4096

_Pages = tuple[int, int]
"""On device, on host."""


class Census:
    """`host_mirror_pages` and `namespace_pages` are those of the last walk that ended.

    `namespace_pages` is keyed by alias and tier: the largest namespaces, and `other` for the rest.
    """

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self.host_mirror_pages = 0
        self.namespace_pages: dict[tuple[str, Tier], int] = {}
        self._begin()
        self._end()

    def advance(self, runs: int = RUNS_PER_SLICE) -> None:
        """Look at up to `runs` more runs; nothing to do while the tree stays as it was."""
        if not self._roots and not self._stack:
            if self._epoch == self._state.tree.epoch:
                return
            self._begin()
        while runs > 0 and (self._roots or self._stack):
            if not self._stack:
                self._next_namespace()
            runs -= self._count(runs) + 1
            if not self._stack:
                self._end_namespace()
        if not self._roots and not self._stack:
            self._end()

    def _begin(self) -> None:
        tree = self._state.tree
        self._epoch = tree.epoch
        self._roots = [(tree.namespaces[digest], root) for digest, root in tree.roots.items()]
        self._stack: list[Run] = []
        self._namespace: Namespace | None = None
        self._device = self._host = self._mirrors = 0
        self._largest: list[tuple[int, bytes, Namespace, _Pages]] = []
        self._rest: _Pages = (0, 0)

    def _next_namespace(self) -> None:
        self._namespace, root = self._roots.pop()
        self._device = self._host = 0
        self._stack.extend(root.children.values())

    def _count(self, runs: int) -> int:
        """Count up to `runs` runs of the namespace under way; returns how many."""
        stack = self._stack
        counted = 0
        while stack and counted < runs:
            run = stack.pop()
            counted += 1
            device, end = run.device_pages, run.host_end
            self._device += device
            self._host += end - run.host_start
            self._mirrors += max(0, min(end, device) - run.host_start)
            stack.extend(run.children.values())
        return counted

    def _end_namespace(self) -> None:
        """Keep the largest apart; a namespace is as many as a client has salts."""
        assert self._namespace is not None
        pages = (self._device, self._host)
        entry = (sum(pages), self._namespace.digest, self._namespace, pages)
        if len(self._largest) < NAMESPACES_SHOWN:
            heapq.heappush(self._largest, entry)
            return
        _, _, _, (device, host) = heapq.heappushpop(self._largest, entry)
        self._rest = (self._rest[0] + device, self._rest[1] + host)

    def _end(self) -> None:
        self.host_mirror_pages = self._mirrors
        named = [(namespace.alias, pages) for _, _, namespace, pages in self._largest]
        self.namespace_pages = {
            (alias, tier): pages
            for alias, counts in [*named, (OTHER_NAMESPACES, self._rest)]
            for tier, pages in zip((Tier.DEVICE, Tier.HOST), counts, strict=True)
        }
