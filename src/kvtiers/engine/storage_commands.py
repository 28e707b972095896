"""Storage comes, goes and is emptied while the engine runs.

Owns the order of these steps and their threads: what may wait for a disk (opening, emptying and
closing a store) is done by the thread that asks for it, and only what touches the parts by the
engine's, which goes on serving meanwhile. Must not know what a store does inside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from kvtiers.engine.parts import EngineParts
from kvtiers.engine.store_closing import wait_closed
from kvtiers.errors import StorageError


class CallInLoop(Protocol):
    """`LLMEngine.call_in_loop`."""

    def __call__(self, fn: Callable[[EngineParts], Any], /) -> Future[Any]: ...


class StorageCommands:
    """What an operator may do to the storage of a running engine. Safe to use from any thread."""

    def __init__(self, parts: EngineParts, call_in_loop: CallInLoop) -> None:
        self._parts = parts
        self._call_in_loop = call_in_loop
        self._attaching = threading.Lock()

    def attach(self) -> None:
        """Open the configured directory and use it; `StorageError` or `ConfigError` if it fails."""
        if not self._attaching.acquire(blocking=False):
            raise StorageError("storage is being attached already; wait until that has ended")
        try:
            self._call_in_loop(EngineParts.check_detached).result()
            store = self._parts.open_store(self._parts.config, self._parts.pools)
            try:
                self._call_in_loop(lambda parts: parts.attach_storage(store)).result()
            except BaseException:
                store.close()  # or its directory would be locked until the process ends
                raise
        finally:
            self._attaching.release()

    def detach(self) -> None:
        """Stop using storage and release its directory, if need be after its last call."""
        closed = self._call_in_loop(EngineParts.detach_storage).result()
        if closed is not None:
            wait_closed(closed)

    def clear(self) -> int:
        """Delete every stored page; returns how many there were.

        What is stored meanwhile may or may not be deleted. What the cache knew of the store's
        content is void afterwards; until then a page that it misses there is computed.
        """
        store = self._call_in_loop(lambda parts: parts.store).result()
        if store is None:
            return 0
        removed: int = store.clear()
        self._call_in_loop(lambda parts: parts.forget_stored(store)).result()
        return removed
