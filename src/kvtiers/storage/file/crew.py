"""A few threads that help whoever calls the store, so that one call keeps the disk busy.

System calls move several pieces at once, and checksums are computed meanwhile. The caller works
along, and never waits for a helper that has not begun: when all helpers are busy, or stuck in the
kernel with somebody else's piece, it does its work alone.

Not `concurrent.futures`: its threads would hold up the end of the process for a stuck disk, and it
takes no work while the interpreter shuts down, when stores are still being written.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class _Round(Generic[ItemT]):
    """The items of one call, and who is working on them."""

    def __init__(self, work: Callable[[ItemT], None], items: Iterable[ItemT]) -> None:
        self.waiting = deque(items)
        self._work = work
        self._changed = threading.Condition()
        self._helping = 0
        self._over = False
        self._error: BaseException | None = None

    def help(self) -> None:
        """Work along, unless the round is over."""
        with self._changed:
            if self._over:
                return
            self._helping += 1
        try:
            self.drain()
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._helping -= 1
                self._changed.notify()

    def drain(self) -> None:
        while True:
            try:
                item = self.waiting.popleft()
            except IndexError:
                return
            self._work(item)

    def end(self) -> None:
        """Begin nothing more, wait for those who work, and raise what one of them raised."""
        self.waiting.clear()
        with self._changed:
            self._over = True
            self._changed.wait_for(lambda: self._helping == 0)
        if self._error is not None:
            raise self._error


class Crew:
    """`helpers` threads beside the callers'; started when first needed."""

    def __init__(self, helpers: int) -> None:
        self._helpers = helpers
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._starting = threading.Lock()
        self._started = 0

    def each(
        self,
        work: Callable[[ItemT], None],
        items: Iterable[ItemT],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Do `work` for every item, in any order and at the same time; returns when all are done.

        The caller does `meanwhile` before it works along. An exception of any of them is raised
        once nothing is being worked on any more; items not begun by then are left undone.
        """
        current = _Round(work, items)
        for _ in range(min(self._helpers, len(current.waiting) - (meanwhile is None))):
            self._start_thread()
            self._calls.put(current.help)
        try:
            if meanwhile is not None:
                meanwhile()
            current.drain()
        finally:
            current.end()

    def close(self) -> None:
        """Let the threads end; calls that are under way end by themselves."""
        for _ in range(self._started):
            self._calls.put(None)

    def _start_thread(self) -> None:
        with self._starting:
            if self._started == self._helpers:
                return
            name = f"kvtiers-file-io-{self._started}"
            try:
                threading.Thread(target=self._help, name=name, daemon=True).start()
            except RuntimeError:  # no thread to be had now: the caller does without
                return
            self._started += 1

    def _help(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
