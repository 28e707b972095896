"""File descriptors: each connection holds one, and an event loop that has none left says so 2,048
times a second.

Owns how many there may be, and how that is told when they have run out.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

log = logging.getLogger("kvtiers.server")

TOLD_SECONDS = 60.0
_RUN_OUT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def allow_all() -> None:
    """Raise the soft limit on open files, often 1,024, to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # where the kernel allows less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class RunOut:
    """An event loop's exception handler that tells of refused connections once a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told_at: float | None = None

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _RUN_OUT and "socket" in context):
            loop.default_exception_handler(context)
            return
        now = self._clock()
        if self._told_at is not None and now - self._told_at < TOLD_SECONDS:
            return
        self._told_at = now
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        log.error(
            "new connections have to wait: %s (at most %d open files); raise `ulimit -n`, or let a "
            "proxy limit how many clients connect",
            error.strerror,
            limit,
        )
