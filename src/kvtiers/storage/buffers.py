"""What every store checks about the buffers it is handed."""

from __future__ import annotations

from collections.abc import Sequence

from kvtiers.errors import StorageError
from kvtiers.storage.port import PageRef


def check_buffers(refs: Sequence[PageRef], buffers: Sequence[memoryview], page_bytes: int) -> None:
    """Raise `StorageError` unless there is one contiguous buffer of one page for each reference."""
    if len(refs) != len(buffers):
        raise StorageError(f"{len(refs)} pages were named and {len(buffers)} buffers were given")
    for buffer in buffers:
        if buffer.nbytes != page_bytes or not buffer.c_contiguous:
            raise StorageError(
                f"a buffer of {buffer.nbytes} bytes (contiguous: {buffer.c_contiguous}) was given "
                f"to a store of pages of {page_bytes} bytes; hand over one contiguous page each"
            )
