"""A store in simulated time: it is slow, fails, forgets, corrupts, fills up and hangs.

Owns what the store holds (`StoredPages`) and the copies from and to it. Checks that a store never
receives a tail without its head (unless it has lost the head itself), nor another page than the
one it is told to write, not even after a deadline.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from kvtiers.errors import InvariantViolation
from kvtiers.events import Copy, HiCacheAck, Lookup
from kvtiers.testing.simulation.carrier import Carrier, Faults, Flight
from kvtiers.testing.simulation.clock import SimClock
from kvtiers.testing.simulation.content import ShadowMemory, path_tags
from kvtiers.types import TOKEN_BYTES, CacheConfig, FailReason, Purpose

_READ_FAILURES = (FailReason.STORAGE, FailReason.INTEGRITY, FailReason.MISSING)
_WRITE_FAILURES = (FailReason.STORAGE, FailReason.QUOTA)


class StoredPages:
    """What one store holds: page tags, each with its parent's (0 for the first of a path)."""

    def __init__(self) -> None:
        self.parents: dict[int, int] = {}
        self.has_lost = False
        """Heads may be missing through no fault of the cache."""

    def __contains__(self, tag: int) -> bool:
        return tag in self.parents

    def lose(self, rng: random.Random) -> None:
        """A page is gone: most often one without children, as a store evicts."""
        if not self.parents:
            return
        tag = rng.choice(list(self.parents))
        if rng.random() < 0.7:
            heads = set(self.parents.values())
            tag = next(each for each in reversed(self.parents) if each not in heads)
        self.discard(tag)

    def discard(self, tag: int) -> None:
        self.has_lost = True
        self.parents.pop(tag, None)


class SimStorage(Carrier):
    """Answers look-ups and carries prefetches and stores. `quota_pages` None: no limit."""

    def __init__(
        self,
        config: CacheConfig,
        clock: SimClock,
        rng: random.Random,
        faults: Faults,
        ack: Callable[[HiCacheAck], None],
        host: ShadowMemory,
        found: Callable[[Lookup, int], None],
        quota_pages: int | None,
    ) -> None:
        super().__init__(config, clock, rng, faults, ack)
        self._host = host
        self._found = found
        self._quota_pages = quota_pages
        self._page_bytes = config.page_tokens * TOKEN_BYTES
        self._stores: dict[int, StoredPages] = {}  # by copy: the store it goes to or comes from
        self.pages = StoredPages()
        self.lookups = 0
        """Look-ups without an answer."""
        self.attached = config.storage

    # ---- coming and going

    def detach(self) -> None:
        """The store is closed; some of what is under way still ends well, the rest does not."""
        self.attached = False
        for op_id in list(self.flights):
            if self.rng.random() < 0.5:
                self.cancel(op_id, FailReason.SHUTDOWN)

    def attach(self, *, another: bool) -> None:
        """Use the store again, or another one, which is empty."""
        self.attached = True
        if another:
            # What is under way to or from the old one will be acknowledged to the cache, which
            # then takes those pages for stored: a hint that the new one contradicts.
            has_lost = bool(self.flights)
            self.pages = StoredPages()
            self.pages.has_lost = has_lost

    def misplace(self) -> None:
        """By chance, a page is lost."""
        if self.rng.random() < self.faults.loss_rate:
            self.pages.lose(self.rng)

    # ---- look-ups

    def look_up(self, lookup: Lookup) -> None:
        self.lookups += 1
        fails = self.rng.random() < self.faults.lookup_fail_rate
        self.clock.after(self.delay(), lambda: self._answer(lookup, fails))

    def _answer(self, lookup: Lookup, fails: bool) -> None:
        self.lookups -= 1
        pages = 0
        if self.attached and not fails:
            tags = path_tags(lookup.namespace, lookup.path_key, self._page_bytes)
            wanted = tags[lookup.first_page : lookup.first_page + lookup.pages]
            while pages < len(wanted) and wanted[pages] in self.pages:
                pages += 1
        self._found(lookup, pages)

    # ---- copies

    def submit(self, copy: Copy) -> None:
        assert copy.namespace is not None
        tags = path_tags(copy.namespace, copy.path_key, self._page_bytes)
        if len(tags) != copy.first_page + copy.pages:
            raise InvariantViolation(
                f"{copy.purpose} {copy.op_id} of pages [{copy.first_page}, "
                f"{copy.first_page + copy.pages}) names a path of {len(tags)} pages"
            )
        wanted = np.array(tags[copy.first_page :], np.int64)
        self._stores[copy.op_id] = self.pages
        if copy.purpose is Purpose.STORE:
            assert copy.source_slots is not None
            self._host.expect(copy.source_slots, wanted, f"store {copy.op_id}")
            self.launch(copy, np.array(tags, np.int64), _WRITE_FAILURES)
        else:
            assert copy.target_slots is not None
            self._host.scribble(copy.target_slots)
            self.launch(copy, wanted, _READ_FAILURES)
        if not self.attached:
            self.cancel(copy.op_id, FailReason.SHUTDOWN)

    def move(self, flight: Flight, pages: int) -> int:
        if flight.copy.purpose is Purpose.STORE:
            return self._write(flight, 0, pages)
        return self._read(flight, pages)

    def write_late(self, flight: Flight) -> None:
        copy = flight.copy
        if copy.purpose is Purpose.STORE:
            # The call was stuck in reading or writing, and goes on where it was.
            self._write(flight, flight.pages_ok, copy.pages)
        else:
            assert copy.target_slots is not None
            self._host.scribble(copy.target_slots[flight.pages_ok :])
        del self._stores[copy.op_id]

    def _read(self, flight: Flight, pages: int) -> int:
        copy, store = flight.copy, self._stores[flight.copy.op_id]
        assert copy.target_slots is not None
        for page, tag in enumerate(flight.tags[:pages].tolist()):
            if tag not in store:
                pages, flight.failure = page, FailReason.MISSING
                break
            if self.rng.random() < self.faults.corruption_rate:
                store.discard(tag)
                pages, flight.failure = page, FailReason.INTEGRITY
                break
        self._host.write(copy.target_slots[:pages], flight.tags[:pages])
        if not flight.late:
            del self._stores[copy.op_id]
        return pages

    def _write(self, flight: Flight, first: int, end: int) -> int:
        """Write pages `[first, end)` of the copy; returns the end of what was written."""
        copy, store = flight.copy, self._stores[flight.copy.op_id]
        assert copy.source_slots is not None
        who = f"store {copy.op_id}, not ended yet,"
        self._host.expect(copy.source_slots, flight.tags[copy.first_page :], who)
        tags = flight.tags.tolist()  # of the whole path
        for page in range(first, end):
            depth = copy.first_page + page
            tag, parent = tags[depth], tags[depth - 1] if depth else 0
            if parent and parent not in store:
                if not store.has_lost:
                    raise InvariantViolation(
                        f"store {copy.op_id} writes page {depth} of a path, and the page before "
                        "it was never stored"
                    )
                end, flight.failure = page, FailReason.ORPHANED
                break
            if self._quota_pages is not None and len(store.parents) >= self._quota_pages:
                end, flight.failure = page, FailReason.QUOTA
                break
            store.parents[tag] = parent
        if not flight.late:
            del self._stores[copy.op_id]
        return end
