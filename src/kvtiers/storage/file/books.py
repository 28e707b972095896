"""What a `file` store holds and what is being done to it, under one lock. No input or output here.

Owns the index of pages, the pins of readers, the pages being written and the counters. A place goes
round: free in `SlotSpace` -> taken by a writer -> in the index (found by readers) -> removed from
the index -> handed back by the method that removed it, for its header to be cleared -> free. A page
that leaves while it is being read hands its place back with its last reader. Places are handed back
children first, the order in which their headers must be cleared.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence

from kvtiers.storage.budget import WriteBudget
from kvtiers.storage.file.space import Place
from kvtiers.storage.index import Entry, PageIndex
from kvtiers.storage.port import PageRef
from kvtiers.types import FailReason


class Books:
    """Every method takes the lock once and does nothing slow under it."""

    def __init__(self, budget: WriteBudget | None, write_bytes_per_page: int) -> None:
        self.index: PageIndex[Place] = PageIndex()
        self.evicted_pages = 0
        self.integrity_failures = 0
        self._budget = budget
        self._write_bytes_per_page = write_bytes_per_page
        self._lock = threading.Lock()

    # ---- reading
    def pin(self, refs: Sequence[PageRef]) -> list[Entry[Place] | None]:
        """The pages named, each with one more reader until `unpin`; None for what is not here."""
        pinned: list[Entry[Place] | None] = []
        with self._lock:
            for ref in refs:
                entry = self.index.pages.get(ref.key)
                if entry is not None:
                    entry.readers += 1
                pinned.append(entry)
        return pinned

    def unpin(self, entries: Iterable[Entry[Place]], used: Iterable[Entry[Place]]) -> list[Place]:
        """The readers are done; `used` are now the most recent. Returns places to clear."""
        left = []
        with self._lock:
            for entry in used:
                self.index.touch(entry)
            for entry in entries:
                entry.readers -= 1
                if not entry.readers and self.index.pages.get(entry.ref.key) is not entry:
                    left.append(entry.place)
        return left

    # ---- writing
    def begin_writes(self, refs: Sequence[PageRef]) -> tuple[list[FailReason | None], list[int]]:
        """An outcome for each page, and the positions of those that have to be written.

        Pages that are here count as written. A page whose parent is neither here nor earlier in the
        batch is not taken; a parent that another thread is writing does not count, because a crash
        could keep the child and lose it. What has to be written is announced: its parent stays
        until `end_writes`.
        """
        outcomes: list[FailReason | None] = [None] * len(refs)
        wanted = []
        in_batch: set[bytes] = set()
        index = self.index
        with self._lock:
            for position, ref in enumerate(refs):
                entry = index.pages.get(ref.key)
                if entry is not None:
                    index.touch(entry)
                elif ref.depth and not (ref.parent in index.pages or ref.parent in in_batch):
                    outcomes[position] = FailReason.ORPHANED
                elif self._budget and not self._budget.take(self._write_bytes_per_page):
                    outcomes[position] = FailReason.QUOTA
                else:
                    index.begin_write(ref)
                    in_batch.add(ref.key)
                    wanted.append(position)
        return outcomes, wanted

    def next_ticks(self, count: int) -> list[int]:
        with self._lock:
            return [self.index.next_tick() for _ in range(count)]

    def end_writes(
        self, begun: Iterable[PageRef], written: Iterable[tuple[PageRef, Place, int]]
    ) -> tuple[set[bytes], list[Place]]:
        """What was written can be read from now on; the rest is forgotten.

        Returns the keys of pages whose parent was deleted meanwhile, which are not taken, and
        places to clear: theirs, and those of pages that another thread wrote first.
        """
        orphans: set[bytes] = set()
        unused = []
        index = self.index
        with self._lock:
            for ref, place, tick in written:  # parents before their children
                if ref.key in index.pages:
                    unused.append(place)
                elif ref.depth and ref.parent not in index.pages:
                    orphans.add(ref.key)
                    unused.append(place)
                else:
                    index.add(ref, place, tick)
            for ref in begun:
                index.end_write(ref)
        unused.reverse()
        return orphans, unused

    def evict(self, count: int) -> list[Entry[Place]]:
        """Up to `count` pages that leave next, in the order in which they leave."""
        victims: list[Entry[Place]] = []
        with self._lock:
            while len(victims) < count:
                victim = self.index.take_victim()
                if victim is None:
                    break
                victims.append(victim)
            self.evicted_pages += len(victims)
        return victims

    def put_back(self, victims: Sequence[Entry[Place]]) -> list[Place]:
        """These pages need not leave after all. Returns places to clear: of those written anew."""
        left = []
        with self._lock:
            for victim in reversed(victims):  # parents before their children
                if victim.ref.key in self.index.pages:
                    left.append(victim.place)
                else:
                    self.index.add(victim.ref, victim.place, victim.used_at)
                    self.evicted_pages -= 1
        return left

    # ---- leaving otherwise
    def remove_damaged(self, entries: Sequence[Entry[Place]]) -> None:
        """Pages that failed verification are not here any more; their reader hands back places."""
        with self._lock:
            self.integrity_failures += len(entries)
            self._remove(entries)

    def remove_unreadable(self, entries: Sequence[Entry[Place]]) -> None:
        """Pages that the disk would not give, likewise."""
        with self._lock:
            self._remove(entries)

    def remove_keys(self, keys: Iterable[bytes]) -> tuple[int, list[Place]]:
        """How many of the pages were here, and places to clear."""
        with self._lock:
            entries = [
                self.index.pages[key] for key in dict.fromkeys(keys) if key in self.index.pages
            ]
            return len(entries), self._remove(entries)

    def remove_all(self) -> tuple[int, list[Place]]:
        with self._lock:
            entries = list(self.index.pages.values())
            return len(entries), self._remove(entries)

    def remove_segments(self, numbers: Collection[int]) -> None:
        """The files of these segments are gone, and all of their pages with them."""
        with self._lock:
            self._remove([e for e in self.index.pages.values() if e.place.segment in numbers])

    def _remove(self, entries: Iterable[Entry[Place]]) -> list[Place]:
        left = []
        for entry in sorted(entries, key=lambda entry: -entry.ref.depth):
            if self.index.pages.get(entry.ref.key) is entry:
                self.index.remove(entry)
                if not entry.readers:
                    left.append(entry.place)
        return left
