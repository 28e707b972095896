"""Closing a store without waiting for it.

A store waits for the calls that are in it and then writes to its disk, which may hang: whoever must
not hang with it has it closed here. Must not know what is closed for what reason.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, wait

from kvtiers.storage.port import PageStore

log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""More than a store waits for its calls."""


def close_apart(store: PageStore) -> Future[None]:
    """Have a store closed by a thread of its own, which does not keep the process alive."""
    closed: Future[None] = Future()

    def close() -> None:
        try:
            store.close()
        except BaseException as error:
            closed.set_exception(error)
        else:
            closed.set_result(None)

    threading.Thread(target=close, name="kvtiers-close-store", daemon=True).start()
    return closed


def wait_closed(closed: Future[None]) -> None:
    """Wait a bounded time for what `close_apart` gave; raises what closing the store raised."""
    if wait([closed], CLOSE_SECONDS).not_done:
        log.warning(
            "the store has not been closed after %g seconds; its directory stays locked until it "
            "is, or until this process ends: see whether its disk hangs",
            CLOSE_SECONDS,
        )
        return
    closed.result()
