"""A file that grows by whole records, and is cut back to the last whole one when a write fails.

Owns a second descriptor of the file, so that it is still the same file after its name was given to
another one. Must not know what a record is.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class WholeFile:
    """Follows a file that another object writes and flushes. Where a file cannot be measured or cut
    (a pipe), nothing is cut."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._whole_bytes = 0
        self.grown()

    def grown(self) -> None:
        """All that the file holds now are whole records."""
        self._whole_bytes = os.fstat(self._descriptor).st_size

    def cut(self) -> None:
        """The file ends after its last whole record. Whoever wrote it has closed it."""
        with suppress(OSError):
            os.ftruncate(self._descriptor, self._whole_bytes)

    def close(self) -> None:
        os.close(self._descriptor)
