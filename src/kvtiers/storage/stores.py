"""Stores by name: how a setting such as `file:/var/cache/kv` becomes a store.

Owns the list of known stores. A store of another make joins it with `register_store`, and can be
put through `kvtiers.testing.storage_contract` first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtiers.errors import ConfigError, UnknownName
from kvtiers.storage.file import FileStore
from kvtiers.storage.memory import MemoryStore
from kvtiers.storage.port import PageStore


def _open_file(location: str, page_bytes: int, quota_bytes: int, **options: Any) -> PageStore:
    if not location:
        raise ConfigError("the file store needs a directory: file:DIRECTORY")
    return FileStore(location, page_bytes, quota_bytes, **options)


def _open_memory(location: str, page_bytes: int, quota_bytes: int, **options: Any) -> PageStore:
    return MemoryStore(page_bytes, quota_bytes, **options)


StoreOpener = Callable[..., PageStore]
"""Called with (location, page_bytes, quota_bytes, **options)."""

_OPENERS: dict[str, StoreOpener] = {"file": _open_file, "memory": _open_memory}


def register_store(name: str, opener: StoreOpener) -> None:
    """`open_store("name:location", ...)` calls `opener` from now on. A name is registered once."""
    if name in _OPENERS:
        raise ConfigError(f"a store named '{name}' is registered already")
    _OPENERS[name] = opener


def known_stores() -> list[str]:
    return sorted(_OPENERS)


def open_store(where: str, page_bytes: int, quota_bytes: int = 0, **options: Any) -> PageStore:
    """Open the store that `where` names: `NAME:LOCATION`, or a directory for the `file` store.

    A plain path is told from a name by its slash or dot: `/var/cache/kv`, `./kv`. Options are the
    store's own. Raises `UnknownName` for a store nobody registered, and whatever its opener raises.
    """
    name, colon, location = where.partition(":")
    if name not in _OPENERS:
        if where.startswith(("/", "./", "../", "~")):
            return _open_file(where, page_bytes, quota_bytes, **options)
        raise UnknownName("store", name, _OPENERS)
    return _OPENERS[name](location if colon else "", page_bytes, quota_bytes, **options)
