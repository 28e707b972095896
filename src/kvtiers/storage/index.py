"""The books of a store: which pages it holds, whose child each is, and which one leaves next.

Owns residency and the order of eviction; knows nothing of bytes, files or threads (the store that
owns an index locks around it). `PlaceT` is whatever the store needs to find the bytes.

Invariants, for every page p in `pages`:

    children(p) == |{c in pages or being written: c.ref.parent == p.ref.key}|
    a page with children or readers is never a victim          (tails leave before heads)
    the victim is the least recently used of all pages that may leave

Children are counted by the parent's key, not in the parent's entry: pages may be added in any order
(a scan at start), and a parent that was lost to damage finds its children again when it is
rewritten.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvtiers.storage.port import PageRef

PlaceT = TypeVar("PlaceT")

_DEAD_RECORDS_MIN = 1024


def reachable_keys(refs: Iterable[PageRef]) -> set[bytes]:
    """The keys of those pages that a look-up from the root can reach through the others."""
    reachable: set[bytes] = set()
    for ref in sorted(refs, key=lambda ref: ref.depth):
        if ref.depth == 0 or ref.parent in reachable:
            reachable.add(ref.key)
    return reachable


@dataclass(slots=True, eq=False)
class Entry(Generic[PlaceT]):
    """One page that can be read. `used_at` is a tick of the index, not a time."""

    ref: PageRef
    place: PlaceT
    used_at: int
    readers: int = 0
    queued: bool = False


class PageIndex(Generic[PlaceT]):
    """Pages by key, and their eviction order: least recently used among those without children.

    The queue is a heap with lazy updates: a page has at most one live record in it, made when the
    page became a leaf; a record whose page was used since is pushed back when it comes up. So a
    touch costs one assignment.
    """

    def __init__(self) -> None:
        self.pages: dict[bytes, Entry[PlaceT]] = {}
        self._children: dict[bytes, int] = {}
        self._queue: list[tuple[int, int, Entry[PlaceT]]] = []
        self._dead_records = 0
        self._tick = 0
        self._serial = 0

    def __len__(self) -> int:
        return len(self.pages)

    def next_tick(self) -> int:
        self._tick += 1
        return self._tick

    def touch(self, entry: Entry[PlaceT]) -> None:
        entry.used_at = self.next_tick()

    # ---- writing: a page on its way already holds its parent
    def begin_write(self, ref: PageRef) -> None:
        """The page is on its way: its parent can no longer leave."""
        self._hold_parent(ref)

    def end_write(self, ref: PageRef) -> None:
        """The page is no longer on its way: it was added before this call, or it failed."""
        self._release_parent(ref)

    # ---- what is held
    def add(self, ref: PageRef, place: PlaceT, used_at: int | None = None) -> Entry[PlaceT]:
        """The page can be read from now on. `used_at` is given when recency is restored."""
        assert ref.key not in self.pages
        if used_at is None:
            used_at = self.next_tick()
        else:
            self._tick = max(self._tick, used_at)
        entry = Entry(ref, place, used_at)
        self.pages[ref.key] = entry
        self._hold_parent(ref)
        self._enqueue_if_leaf(entry)
        return entry

    def remove(self, entry: Entry[PlaceT]) -> None:
        """The page cannot be read any more, children or not (damage, or a command)."""
        assert self.pages.get(entry.ref.key) is entry
        del self.pages[entry.ref.key]
        self._dead_records += entry.queued
        self._release_parent(entry.ref)
        if self._dead_records > len(self.pages) + _DEAD_RECORDS_MIN:
            self._queue = [r for r in self._queue if self.pages.get(r[2].ref.key) is r[2]]
            heapq.heapify(self._queue)
            self._dead_records = 0

    def take_victim(self) -> Entry[PlaceT] | None:
        """Remove and return the page that leaves next; None when something holds every page."""
        busy: list[tuple[int, int, Entry[PlaceT]]] = []
        victim = None
        while self._queue and victim is None:
            record = heapq.heappop(self._queue)
            queued_at, serial, entry = record
            if self.pages.get(entry.ref.key) is not entry:
                self._dead_records -= 1
            elif entry.ref.key in self._children:
                entry.queued = False  # queued again when its last child leaves
            elif entry.used_at != queued_at:
                heapq.heappush(self._queue, (entry.used_at, serial, entry))
            elif entry.readers:
                busy.append(record)
            else:
                entry.queued = False
                victim = entry
        for record in busy:
            heapq.heappush(self._queue, record)
        if victim is not None:
            self.remove(victim)
        return victim

    def unreachable(self) -> list[Entry[PlaceT]]:
        """Pages that no look-up can reach, because a page above them is missing; deepest first."""
        reachable = reachable_keys(entry.ref for entry in self.pages.values())
        lost = [entry for key, entry in self.pages.items() if key not in reachable]
        return sorted(lost, key=lambda entry: -entry.ref.depth)

    # ---- children
    def _hold_parent(self, ref: PageRef) -> None:
        if ref.depth:
            self._children[ref.parent] = self._children.get(ref.parent, 0) + 1

    def _release_parent(self, ref: PageRef) -> None:
        if not ref.depth:
            return
        children = self._children[ref.parent] - 1
        if children:
            self._children[ref.parent] = children
            return
        del self._children[ref.parent]
        parent = self.pages.get(ref.parent)
        if parent is not None:
            self._enqueue_if_leaf(parent)

    def _enqueue_if_leaf(self, entry: Entry[PlaceT]) -> None:
        if not entry.queued and entry.ref.key not in self._children:
            entry.queued = True
            self._serial += 1
            heapq.heappush(self._queue, (entry.used_at, self._serial, entry))
