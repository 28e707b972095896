"""A few threads that help whoever calls the store, so that one call keeps the disk busy.

System calls move several pieces at once; meanwhile the caller does what only it can do (checksums,
then the header of each piece that has arrived) or works along. It never waits for a helper that has
not begun: when all are busy, or stuck in the kernel with somebody else's piece, it works alone.

Not `concurrent.futures`: its threads would hold up the end of the process for a stuck disk, and it
takes no work while the interpreter shuts down, when stores are still being written.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

ItemT = TypeVar("ItemT")


class _Round(Generic[ItemT]):
    """The items of one call, and who is working on them. They are begun in their order."""

    def __init__(self, work: Callable[[ItemT], None], items: Iterable[ItemT]) -> None:
        self.items = list(items)
        self._work = work
        self._waiting = deque(range(len(self.items)))
        self._done = [False] * len(self.items)
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
        while self._work_on_next():
            pass

    def finish(self, index: int) -> bool:
        """Wait until item `index` is done; False after an error. Does what nobody has begun."""
        while not self._done[index] and self._error is None:
            if self._is_begun(index) or not self._work_on_next():
                with self._changed:
                    self._changed.wait_for(lambda: self._done[index] or self._error is not None)
        return self._error is None

    def end(self) -> None:
        """Begin nothing more, wait for those who work, and raise what one of them raised."""
        self._waiting.clear()
        with self._changed:
            self._over = True
            self._changed.wait_for(lambda: self._helping == 0)
        if self._error is not None:
            raise self._error

    def _is_begun(self, index: int) -> bool:
        try:
            return self._waiting[0] > index
        except IndexError:
            return True

    def _work_on_next(self) -> bool:
        try:
            index = self._waiting.popleft()
        except IndexError:
            return False
        self._work(self.items[index])
        with self._changed:
            self._done[index] = True
            self._changed.notify()
        return True


class Crew:
    """`helpers` threads beside the callers'; started when first needed."""

    def __init__(self, helpers: int) -> None:
        self._helpers = helpers
        self._news = threading.Condition()
        self._rounds: list[_Round[Any]] = []  # those that have items waiting, oldest first
        self._started = 0
        self._closed = False

    def each(
        self,
        work: Callable[[ItemT], None],
        items: Iterable[ItemT],
        *,
        meanwhile: Callable[[], None] | None = None,
        then: Callable[[ItemT], None] | None = None,
    ) -> None:
        """Do `work` for every item, in any order and at the same time; returns when all are done.

        The caller does `meanwhile` first. It then works along or, given `then`, does that with each
        item whose work is done, in the order of the items. An exception of any of them is raised
        once nothing is being worked on any more; what was not begun by then is left undone.
        """
        current = _Round(work, items)
        caller_works_at_once = meanwhile is None and then is None
        self._call(current, len(current.items) - caller_works_at_once)
        try:
            if meanwhile is not None:
                meanwhile()
            if then is None:
                current.drain()
            else:
                for index, item in enumerate(current.items):
                    if not current.finish(index):
                        break
                    then(item)
        finally:
            self._withdraw(current)
            current.end()

    def close(self) -> None:
        """Let the threads end; calls that are under way end by themselves."""
        with self._news:
            self._closed = True
            self._news.notify_all()

    def _call(self, current: _Round[Any], helpers: int) -> None:
        """Ask for up to `helpers` threads, as many as there are."""
        if helpers < 1:
            return
        with self._news:
            while self._started < min(self._helpers, helpers) and self._start_thread():
                self._started += 1
            self._rounds.append(current)
            self._news.notify(helpers)

    def _withdraw(self, over: _Round[Any]) -> None:
        with self._news:
            if over in self._rounds:
                self._rounds.remove(over)

    def _start_thread(self) -> bool:
        name = f"kvtiers-file-io-{self._started}"
        try:
            threading.Thread(target=self._help, name=name, daemon=True).start()
        except RuntimeError:  # no thread to be had now: the callers do with fewer
            return False
        return True

    def _help(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._rounds or self._closed)
                if not self._rounds:
                    return
                current = self._rounds[0]
            current.help()
            self._withdraw(current)
