"""The places a store writes to: taken, made free by eviction, and handed back.

Owns the rule that a place is free only when its header on disk is zeros, so that a crash cannot
bring back the page that was there; and the order in which headers are cleared, children first, so
that a crash in between leaves no page that cannot be reached.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection, Sequence

from kvtiers.storage.file.books import Books
from kvtiers.storage.file.space import Place, SlotSpace
from kvtiers.types import FailReason

_log = logging.getLogger("kvtiers.storage")


class Places:
    """Safe between threads."""

    def __init__(self, space: SlotSpace, books: Books, name: str) -> None:
        self._space = space
        self._books = books
        self._name = name
        self._evicting = threading.Lock()
        self._uncleared: deque[Place] = deque()  # nobody's, and not free while the disk refuses
        self._growth_trouble: str | None = None

    def take(self, count: int) -> tuple[list[Place], FailReason]:
        """Up to `count` places to write to, in disk order, and the reason if they are fewer."""
        places: list[Place] = []
        try:
            shortage = self._take(count, places)
        except BaseException:
            self._space.give(places)
            raise
        places.sort()
        return places, shortage

    def free(self, places: Sequence[Place]) -> int:
        """Places that no page is at any more, children first, can be written again.

        Returns of how many the header is still on disk: they are tried again before later writes,
        and a crash until then brings their pages back.
        """
        cleared = self._clear_until_failure(places)
        self._space.give(list(places[:cleared]))
        self._uncleared.extend(places[cleared:])
        return len(places) - cleared

    def clear_again(self) -> None:
        """Try the headers that could not be cleared, until one cannot be still."""
        while self._uncleared:
            place = self._uncleared.popleft()
            if not self._clear_until_failure([place]):
                self._uncleared.append(place)  # behind the others: it may be the only bad one
                return
            self._space.give([place])

    def lose_segments(self, numbers: Collection[int]) -> None:
        """The files of these segments were deleted underneath: their pages and places are gone."""
        for number in numbers:
            if self._space.forget(number):
                _log.warning("%s: segment %d was deleted underneath", self._name, number)
        if numbers:
            self._books.remove_segments(numbers)

    # ---- how
    def _take(self, count: int, places: list[Place]) -> FailReason:
        self.clear_again()
        places += self._space.take(count)
        while len(places) < count and self._grow():
            places += self._space.take(count - len(places))
        shortage = FailReason.QUOTA if self._growth_trouble is None else FailReason.STORAGE
        if len(places) < count:
            # One evicting thread at a time: headers are cleared in the order in which pages leave.
            with self._evicting:
                wanted = count - len(places)
                evicted = self._evict(wanted)
                places += evicted
                if len(evicted) < wanted and self._uncleared:
                    shortage = FailReason.STORAGE
        return shortage

    def _grow(self) -> bool:
        try:
            has_grown = self._space.grow()
        except OSError as error:
            self._tell_growth_trouble(str(error))
            return False
        if has_grown:
            self._growth_trouble = None
        return has_grown

    def _evict(self, count: int) -> list[Place]:
        """Make room by pages that leave; where a header cannot be cleared, by no more than that.

        A disk that refuses for a moment would otherwise cost every page there is.
        """
        victims = self._books.evict(count)
        places = [victim.place for victim in victims]
        cleared = self._clear_until_failure(places)
        if cleared < len(places):
            self._uncleared.append(places[cleared])  # not put back: the next one gets its turn
            self._uncleared.extend(self._books.put_back(victims[cleared + 1 :]))
        return places[:cleared]

    def _clear_until_failure(self, places: Sequence[Place]) -> int:
        """How many headers, from the first on, are zeros on disk now (or gone with their file)."""
        for cleared, place in enumerate(places):
            segment = self._space.segments.get(place.segment)
            if segment is None:
                continue
            try:
                segment.clear_header(place.slot)
            except OSError as error:
                _log.warning(
                    "%s: the header of slot %d cannot be cleared, and the slot is not used until "
                    "it can: %s",
                    segment.path,
                    place.slot,
                    error,
                )
                return cleared
        return len(places)

    def _tell_growth_trouble(self, trouble: str) -> None:
        """Once until it changes: every write runs into it."""
        if trouble != self._growth_trouble:
            self._growth_trouble = trouble
            _log.warning(
                "%s cannot grow: %s; pages that find no room are not stored until it can (where "
                "the directory was deleted: until the store is opened again)",
                self._name,
                trouble,
            )
