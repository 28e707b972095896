"""A few threads that help whoever calls the store, so that one call keeps the disk busy.

System calls move several pieces at once, and checksums are computed meanwhile. The caller works
along, and never waits for a helper that has not begun: when all helpers are busy, or stuck in the
kernel with somebody else's piece, it does its work alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

ItemT = TypeVar("ItemT")


class Crew:
    """`helpers` threads beside the callers'; started when first needed."""

    def __init__(self, helpers: int) -> None:
        self._helpers = helpers
        self._pool = ThreadPoolExecutor(helpers, thread_name_prefix="kvtiers-file-io")

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
        waiting = deque(items)

        def drain() -> None:
            while True:
                try:
                    item = waiting.popleft()
                except IndexError:
                    return
                try:
                    work(item)
                except BaseException:
                    waiting.clear()
                    raise

        helpers = min(self._helpers, len(waiting) - (meanwhile is None))
        helping = [self._pool.submit(drain) for _ in range(helpers)]
        try:
            if meanwhile is not None:
                meanwhile()
            drain()
        finally:
            waiting.clear()
            begun = [future for future in helping if not future.cancel()]
            errors = [error for future in begun if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Let the threads end; calls that are under way end by themselves."""
        self._pool.shutdown(wait=False)
