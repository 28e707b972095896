"""The `file` store: pages in a few preallocated segment files."""

from kvtiers.storage.file.store import FileStore

__all__ = ["FileStore"]
