"""One segment file: pages in and out of its slots, headers in and out of its table.

Owns the file descriptors and how bytes reach the disk: direct I/O on one descriptor for pages where
the file system takes it, the page cache on another one for the tables. Knows nothing of which page
is where, and decides nothing. May be used from several threads as long as nobody writes a slot that
another one uses (the store sees to that).

Errors are `OSError`s; `ShortRead` (the file ends before the page does) and `SegmentGone` (the file
was deleted underneath) are two of them.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtiers.storage.file import format as fmt
from kvtiers.storage.file.directory import sync_directory
from kvtiers.storage.file.format import ALIGN_BYTES, HEADER_BYTES, Geometry

RUN_BYTES = 2 << 20
"""Neighbouring slots are moved by one system call, as many as come closest to this size."""

_BOUNCE_BYTES = 2 << 20
_IOV_MAX = 1024
_NOT_SUPPORTED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}


class SegmentGone(FileNotFoundError):
    """The file was deleted while it was open."""


class ShortRead(OSError):
    """The file ends before what was asked for: it was truncated."""


class Segment:
    """An open segment file. `direct_io_refusal` says why pages go through the page cache, if so."""

    def __init__(self, path: Path, geometry: Geometry, slots: int, writable: bool) -> None:
        self.path = path
        self.geometry = geometry
        self.slots = slots
        """Slots that the file is long enough for; fewer than the geometry's once truncated."""
        self.direct_io_refusal: str | None = None
        mode = os.O_RDWR if writable else os.O_RDONLY
        self._table_fd = os.open(path, mode | os.O_CLOEXEC)
        self._data_fd = self._open_direct(mode)
        # The last thread that uses a forgotten segment closes it: a descriptor that is closed
        # under a running read could already mean another file.
        self._close = weakref.finalize(self, _close_all, {self._table_fd, self._data_fd})
        self._close.atexit = False  # helpers may still be writing then

    @classmethod
    def create(cls, path: Path, geometry: Geometry, *, sync: bool) -> Segment:
        """A new segment with every slot free, its whole size allocated on disk.

        It appears under `path` only when it is complete; a crash leaves a `.tmp` file at most. With
        `sync` it is there after a power loss, too.
        """
        draft = path.with_suffix(".tmp")
        segment: Segment | None = None
        try:
            fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.fchmod(fd, 0o600)
                _allocate(fd, geometry.file_bytes)
                _write_all(fd, [memoryview(fmt.pack_superblock(geometry))], 0)
                if sync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            # Opened under its first name: nothing that can fail may come after the last one.
            segment = cls(draft, geometry, geometry.slots, writable=True)
            draft.rename(path)
            segment.path = path
            if sync:
                sync_directory(path.parent)
        except OSError:
            if segment is not None:
                segment.close()
                segment.path.unlink(missing_ok=True)
            draft.unlink(missing_ok=True)
            raise
        return segment

    @classmethod
    def open(cls, path: Path, *, writable: bool) -> Segment:
        """Raises `UnreadableSegment` for a file that is no segment of this format."""
        with path.open("rb") as file:
            geometry = fmt.unpack_superblock(file.read(fmt.SUPERBLOCK_BYTES))
            data_bytes = os.fstat(file.fileno()).st_size - geometry.data_offset
        slots = min(geometry.slots, data_bytes // geometry.slot_bytes)
        if slots < 1:
            raise fmt.UnreadableSegment("it was truncated before its first page", damaged=True)
        return cls(path, geometry, slots, writable)

    def close(self) -> None:
        self._close()

    @property
    def file_bytes(self) -> int:
        return os.fstat(self._table_fd).st_size

    # ---- tables
    def read_header_table(self) -> bytes:
        return self._read_table(fmt.SUPERBLOCK_BYTES, self.slots * HEADER_BYTES)

    def read_headers(self, first_slot: int, count: int) -> bytes:
        offset = fmt.SUPERBLOCK_BYTES + first_slot * HEADER_BYTES
        return self._read_table(offset, count * HEADER_BYTES)

    def write_headers(self, first_slot: int, headers: bytes) -> None:
        """The last step of writing pages, so the one that must find the file still there."""
        self._check_linked()
        self._write_table(fmt.SUPERBLOCK_BYTES + first_slot * HEADER_BYTES, headers)

    def clear_header(self, slot: int) -> None:
        """The slot is free, also for whoever opens the file next."""
        self._write_table(fmt.SUPERBLOCK_BYTES + slot * HEADER_BYTES, fmt.FREE_HEADER)

    def read_recency(self) -> npt.NDArray[np.uint64]:
        raw = self._read_table(self.geometry.recency_offset, self.slots * fmt.RECENCY_BYTES)
        return fmt.unpack_recency(raw)

    def write_recency(self, used_at: npt.NDArray[np.uint64]) -> None:
        self._write_table(self.geometry.recency_offset, fmt.pack_recency(used_at))

    # ---- pages
    def read_pages(self, first_slot: int, buffers: Sequence[memoryview]) -> None:
        """Fill each buffer (one page of bytes) from its slot, `first_slot` on."""
        self._check_linked()
        geometry = self.geometry
        slot_bytes, page_bytes = geometry.slot_bytes, geometry.page_bytes
        offset = geometry.data_offset + first_slot * slot_bytes
        if self._goes_straight(buffers):
            _read_all(self._data_fd, buffers, offset, direct=self.direct_io_refusal is None)
        elif self.direct_io_refusal is not None:
            for buffer in buffers:
                _read_all(self._data_fd, [buffer], offset, direct=False)
                offset += slot_bytes
        else:
            for part, bounce in self._bounced(buffers):
                into = [bounce.data[: len(part) * slot_bytes]]
                _read_all(self._data_fd, into, offset, direct=True)
                for buffer, slot in zip(part, bounce.reshape(-1, slot_bytes), strict=False):
                    np.copyto(np.frombuffer(buffer, np.uint8), slot[:page_bytes])
                offset += len(part) * slot_bytes

    def write_pages(self, first_slot: int, buffers: Sequence[memoryview]) -> None:
        """Put each buffer (one page of bytes) into its slot, `first_slot` on."""
        geometry = self.geometry
        slot_bytes, page_bytes = geometry.slot_bytes, geometry.page_bytes
        offset = geometry.data_offset + first_slot * slot_bytes
        if self._goes_straight(buffers):
            _write_all(self._data_fd, buffers, offset)
        elif self.direct_io_refusal is not None:
            for buffer in buffers:
                _write_all(self._data_fd, [buffer], offset)
                offset += slot_bytes
        else:
            for part, bounce in self._bounced(buffers):
                for buffer, slot in zip(part, bounce.reshape(-1, slot_bytes), strict=False):
                    np.copyto(slot[:page_bytes], np.frombuffer(buffer, np.uint8))
                    slot[page_bytes:] = 0
                _write_all(self._data_fd, [bounce.data[: len(part) * slot_bytes]], offset)
                offset += len(part) * slot_bytes

    def sync(self) -> None:
        """What was written so far survives a power loss."""
        os.fdatasync(self._table_fd)

    # ---- how
    def _open_direct(self, mode: int) -> int:
        try:
            fd = os.open(self.path, mode | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                os.close(self._table_fd)
                raise
            self.direct_io_refusal = os.strerror(error.errno or 0)
            return self._table_fd
        try:  # some file systems take the flag and refuse the read
            with mmap.mmap(-1, ALIGN_BYTES) as probe:
                os.preadv(fd, [probe], 0)
        except OSError as error:
            os.close(fd)
            self.direct_io_refusal = os.strerror(error.errno or 0)
            return self._table_fd
        return fd

    def _goes_straight(self, buffers: Sequence[memoryview]) -> bool:
        """Whether the buffers can be handed to the kernel as they are, all in one call."""
        if self.geometry.page_bytes != self.geometry.slot_bytes:
            return False
        if self.direct_io_refusal is not None:
            return True
        return all(
            np.frombuffer(buffer, np.uint8).__array_interface__["data"][0] % ALIGN_BYTES == 0
            for buffer in buffers
        )

    def _bounced(
        self, buffers: Sequence[memoryview]
    ) -> Iterator[tuple[Sequence[memoryview], npt.NDArray[np.uint8]]]:
        """Parts of `buffers`, each with an aligned array of its own size in slots."""
        slot_bytes = self.geometry.slot_bytes
        bounce = _bounce_array(slot_bytes)
        slots = len(bounce) // slot_bytes
        for first in range(0, len(buffers), slots):
            part = buffers[first : first + slots]
            yield part, bounce[: len(part) * slot_bytes]

    def _read_table(self, offset: int, table_bytes: int) -> bytes:
        raw = os.pread(self._table_fd, table_bytes, offset)
        if len(raw) != table_bytes:
            raise ShortRead(f"{self.path} ends inside its tables")
        return raw

    def _write_table(self, offset: int, raw: bytes) -> None:
        _write_all(self._table_fd, [memoryview(raw)], offset)

    def _check_linked(self) -> None:
        if os.fstat(self._table_fd).st_nlink == 0:
            raise SegmentGone(errno.ENOENT, "the segment was deleted underneath", str(self.path))


_per_thread = threading.local()


def _bounce_array(slot_bytes: int) -> npt.NDArray[np.uint8]:
    """This thread's aligned array, of a whole number of slots."""
    wanted_bytes = max(slot_bytes, _BOUNCE_BYTES)
    array: npt.NDArray[np.uint8] | None = getattr(_per_thread, "bounce", None)
    if array is None or len(array) < wanted_bytes:
        array = np.frombuffer(mmap.mmap(-1, wanted_bytes), np.uint8)
        _per_thread.bounce = array
    return array[: len(array) // slot_bytes * slot_bytes]


def _read_all(fd: int, buffers: Sequence[memoryview], offset: int, *, direct: bool) -> None:
    for part in _vectors(buffers):
        part_bytes = sum(buffer.nbytes for buffer in part)
        done_bytes = os.preadv(fd, part, offset)
        while done_bytes < part_bytes:
            # Direct I/O stops in the middle of a block at the file's end only, and cannot go on.
            at_end = direct and done_bytes % ALIGN_BYTES != 0
            rest = [] if at_end else _after(part, done_bytes)
            more_bytes = os.preadv(fd, rest, offset + done_bytes) if rest else 0
            if more_bytes == 0:
                raise ShortRead(f"the file ends {part_bytes - done_bytes} bytes before the page")
            done_bytes += more_bytes
        offset += part_bytes


def _write_all(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    for part in _vectors(buffers):
        part_bytes = sum(buffer.nbytes for buffer in part)
        done_bytes = os.pwritev(fd, part, offset)
        while done_bytes < part_bytes:
            more_bytes = os.pwritev(fd, _after(part, done_bytes), offset + done_bytes)
            if more_bytes == 0:
                raise OSError(errno.EIO, "the file takes no more, and does not say why")
            done_bytes += more_bytes
        offset += part_bytes


def _vectors(buffers: Sequence[memoryview]) -> Iterator[Sequence[memoryview]]:
    for first in range(0, len(buffers), _IOV_MAX):
        yield buffers[first : first + _IOV_MAX]


def _after(buffers: Sequence[memoryview], done_bytes: int) -> list[memoryview]:
    """What is left of `buffers` once their first `done_bytes` bytes were moved."""
    rest = []
    for buffer in buffers:
        if done_bytes < buffer.nbytes:
            rest.append(buffer.cast("B")[done_bytes:] if done_bytes else buffer)
        done_bytes = max(0, done_bytes - buffer.nbytes)
    return rest


def _allocate(fd: int, file_bytes: int) -> None:
    """Give the file its size, and its blocks where the file system can."""
    try:
        os.posix_fallocate(fd, 0, file_bytes)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        os.ftruncate(fd, file_bytes)  # a write may then find the disk full; it says so


def _close_all(fds: set[int]) -> None:
    for fd in fds:
        os.close(fd)
