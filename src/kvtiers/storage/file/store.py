"""`FileStore`: pages in a few preallocated segment files, for one writing process.

Owns the calls and their outcomes; what is where is in `books`, what may be written to in `places`,
how bytes reach the disk in `batch` and `segment`, how far it may grow in `space`.

Promise of an acknowledgement (None from `write_from`): the page is whole on disk or in the kernel,
is found from now on, and is found again after a SIGKILL of this process at any point. It does not
promise to survive a power loss unless `sync` is on. What is found is verified on every read.

Order of writing one page; a crash between any two steps leaves an old page, a new one, or a free
slot, never a mixture that looks whole:

    1. the header of the page that had the slot is zeroed        (it is no longer found)
    2. the page is written                          [sync]
    3. the header is written                        [sync]       (it is found by the next open)
    4. the page enters the index                                 (it is found, and acknowledged)
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvtiers.errors import ConfigError, StorageError
from kvtiers.storage.budget import WriteBudget
from kvtiers.storage.buffers import check_buffers
from kvtiers.storage.file import format as fmt
from kvtiers.storage.file.batch import WriteBatch
from kvtiers.storage.file.books import Books
from kvtiers.storage.file.compaction import compact
from kvtiers.storage.file.crew import Crew
from kvtiers.storage.file.directory import StoreDirectory
from kvtiers.storage.file.places import Places
from kvtiers.storage.file.recovery import recover, shrink_to_quota
from kvtiers.storage.file.runs import runs
from kvtiers.storage.file.segment import RUN_BYTES, SegmentGone, ShortRead
from kvtiers.storage.file.space import Place, SlotSpace, usual_segment_bytes
from kvtiers.storage.index import Entry
from kvtiers.storage.port import PageRef, StoreStats
from kvtiers.types import FailReason

_log = logging.getLogger("kvtiers.storage")

_CHUNK_BYTES = 128 << 20
"""A batch becomes readable in pieces of this size, its head first."""

_HELPERS = 8
"""Pieces in flight: what keeps a fast disk busy to the end of a call."""

_CLOSE_WAIT_SECONDS = 5.0


class Reclaimed(NamedTuple):
    """What `reclaim` gave back."""

    damaged_pages: int
    unreachable_pages: int
    freed_bytes: int


class FileStore:
    """A store of pages of `page_bytes` in `directory`, which takes at most `quota_bytes` on disk.

    `quota_bytes` covers everything in the directory, before and after reopening; 0 is no limit.
    `sync` makes an acknowledgement survive a power loss, at the price of two flushes for each batch
    of writes. `write_bytes_per_second` caps what is written over time (`write_burst_seconds` of it
    at once) against wear; what is over the cap is declined with `QUOTA`. `segment_bytes` is the
    size of one file; by default an eighth of the quota, between 64 MiB and 1 GiB, and
    more where that would make more than 128 files.

    Raises `StorageLocked` when another process has the directory, `StorageError` when it cannot be
    used, `ConfigError` for settings that make no sense.
    """

    name = "file"

    def __init__(
        self,
        directory: str | Path,
        page_bytes: int,
        quota_bytes: int = 0,
        *,
        sync: bool = False,
        write_bytes_per_second: float | None = None,
        write_burst_seconds: float = 10.0,
        segment_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if page_bytes < 1 or quota_bytes < 0 or (segment_bytes is not None and segment_bytes < 1):
            raise ConfigError(
                f"a file store needs positive sizes; got pages of {page_bytes} bytes, a quota of "
                f"{quota_bytes} bytes (0 for no limit) and segments of {segment_bytes} bytes"
            )
        self.page_bytes = page_bytes
        self.sync = sync
        slot_bytes = fmt.round_up(page_bytes)
        self._chunk_pages = max(1, _CHUNK_BYTES // slot_bytes)
        self._run_pages = max(1, round(RUN_BYTES / slot_bytes))
        budget = None
        if write_bytes_per_second is not None:
            budget = WriteBudget(write_bytes_per_second, write_burst_seconds, slot_bytes, clock)
        if segment_bytes is None:
            segment_bytes = usual_segment_bytes(quota_bytes)

        self._directory = StoreDirectory.acquire(Path(directory).expanduser())
        try:
            self._space = SlotSpace(
                self._directory, page_bytes, quota_bytes, segment_bytes, sync=sync
            )
            self._books = Books(budget, slot_bytes)
            damaged_headers = recover(self._space, self._books.index)
            self._books.integrity_failures = damaged_headers + self._space.damaged_segments
            self._books.evicted_pages = shrink_to_quota(self._space, self._books.index)
        except BaseException as error:
            self._directory.release()
            if isinstance(error, OSError):
                raise StorageError(f"{directory} cannot be opened as a store: {error}") from error
            raise
        self._places = Places(self._space, self._books, str(self._directory.path))
        self._crew = Crew(_HELPERS)
        self._state = threading.Condition()
        self._running_calls = 0
        self._closing = False
        self._released = False

    @property
    def direct_io(self) -> bool:
        """Whether pages bypass the page cache (so far: True while there is no segment yet)."""
        return not any(s.direct_io_refusal for s in list(self._space.segments.values()))

    # ---- the port
    def exists_prefix(self, refs: Sequence[PageRef]) -> int:
        if self._closing:
            return 0
        held = self._books.index.pages  # single look-ups need no lock
        for pages, ref in enumerate(refs):
            if ref.key not in held:
                return pages
        return len(refs)

    def read_into(
        self, refs: Sequence[PageRef], buffers: Sequence[memoryview]
    ) -> list[FailReason | None]:
        check_buffers(refs, buffers, self.page_bytes)
        outcomes: list[FailReason | None] = []
        with self._call() as running:
            if not running:
                return [FailReason.SHUTDOWN] * len(refs)
            for first in range(0, len(refs), self._chunk_pages):
                chunk = slice(first, first + self._chunk_pages)
                outcomes += self._read_chunk(refs[chunk], buffers[chunk])
        return outcomes

    def write_from(
        self, refs: Sequence[PageRef], buffers: Sequence[memoryview]
    ) -> list[FailReason | None]:
        check_buffers(refs, buffers, self.page_bytes)
        _check_refs(refs)
        outcomes: list[FailReason | None] = []
        with self._call() as running:
            if not running:
                return [FailReason.SHUTDOWN] * len(refs)
            for first in range(0, len(refs), self._chunk_pages):
                chunk = slice(first, first + self._chunk_pages)
                outcomes += self._write_chunk(refs[chunk], buffers[chunk])
        return outcomes

    def delete(self, refs: Sequence[PageRef]) -> int:
        with self._call() as running:
            if not running:
                return 0
            deleted, places = self._books.remove_keys(ref.key for ref in refs)
            return deleted - self._places.free(places)

    def clear(self) -> int:
        with self._call() as running:
            if not running:
                return 0
            deleted, places = self._books.remove_all()
            uncleared = self._places.free(places)
            self._space.remove_foreign()
        return deleted - uncleared

    def stats(self) -> StoreStats:
        return StoreStats(
            pages=len(self._books.index),
            used_bytes=self._space.used_bytes,
            quota_bytes=self._space.quota_bytes,
            evicted_pages=self._books.evicted_pages,
            integrity_failures=self._books.integrity_failures,
        )

    def close(self) -> None:
        """Later calls get `SHUTDOWN`. Waits for running ones up to five seconds.

        A call that is still stuck in the kernel then keeps the directory locked until it ends: a
        write that comes late must not hit a file that somebody else owns by now.
        """
        with self._state:
            self._closing = True
            self._state.wait_for(lambda: self._running_calls == 0, _CLOSE_WAIT_SECONDS)
            if self._running_calls == 0:
                self._release()

    def __enter__(self) -> FileStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- maintenance
    def reclaim(self) -> Reclaimed:
        """Drop damaged and unreachable pages and give back every segment that is not needed.

        For a store that nobody else uses meanwhile (`kvtiers storage gc`).
        """
        buffer = memoryview(bytearray(self.page_bytes))
        damaged_before = self._books.integrity_failures
        by_place = sorted(self._books.index.pages.values(), key=lambda entry: entry.place)
        for entry in by_place:
            self.read_into([entry.ref], [buffer])
        unreachable = self._books.index.unreachable()
        self.delete([entry.ref for entry in unreachable])
        freed_bytes = compact(self._space, self._books.index)
        damaged_pages = self._books.integrity_failures - damaged_before
        return Reclaimed(damaged_pages, len(unreachable), freed_bytes)

    # ---- reading
    def _read_chunk(
        self, refs: Sequence[PageRef], buffers: Sequence[memoryview]
    ) -> list[FailReason | None]:
        outcomes: list[FailReason | None] = [FailReason.MISSING] * len(refs)
        pinned = self._books.pin(refs)
        present = [position for position, entry in enumerate(pinned) if entry is not None]
        entries = [entry for entry in pinned if entry is not None]
        used: list[Entry[Place]] = []

        def read_run(run: range) -> None:
            into = [buffers[present[i]] for i in run]
            got = self._read_run(entries[run.start : run.stop], into)
            for i, outcome in zip(run, got, strict=True):
                outcomes[present[i]] = outcome

        try:
            self._crew.each(read_run, runs([entry.place for entry in entries], self._run_pages))
            used = [entries[i] for i, position in enumerate(present) if outcomes[position] is None]
        finally:
            self._places.free(self._books.unpin(entries, used))
        return outcomes

    def _read_run(
        self, entries: Sequence[Entry[Place]], buffers: Sequence[memoryview]
    ) -> list[FailReason | None]:
        """Read neighbouring pages and verify each; what is wrong is forgotten."""
        first = entries[0].place
        segment = self._space.segments.get(first.segment)
        if segment is None:
            return [FailReason.MISSING] * len(entries)
        try:
            headers = memoryview(segment.read_headers(first.slot, len(entries)))
            segment.read_pages(first.slot, buffers)
        except SegmentGone:
            self._places.lose_segments({first.segment})
            return [FailReason.MISSING] * len(entries)
        except OSError as error:
            if len(entries) > 1:  # find out which of them it is
                return [
                    self._read_run([entry], [buffer])[0]
                    for entry, buffer in zip(entries, buffers, strict=True)
                ]
            if isinstance(error, ShortRead):
                self._books.remove_damaged(entries)
                return [FailReason.INTEGRITY]
            # The page is forgotten, or it would count as written for ever and never be repaired.
            _log.warning("%s: a page cannot be read: %s", segment.path, error)
            self._books.remove_unreadable(entries)
            return [FailReason.STORAGE]
        damaged = [
            position
            for position, (entry, buffer) in enumerate(zip(entries, buffers, strict=True))
            if not self._is_whole(
                headers[position * fmt.HEADER_BYTES : (position + 1) * fmt.HEADER_BYTES],
                entry.ref,
                buffer,
            )
        ]
        if not damaged:
            return [None] * len(entries)
        _log.warning("%s: %d damaged pages are forgotten", segment.path, len(damaged))
        self._books.remove_damaged([entries[position] for position in damaged])
        return [
            FailReason.INTEGRITY if position in damaged else None
            for position in range(len(entries))
        ]

    def _is_whole(self, raw_header: memoryview, ref: PageRef, buffer: memoryview) -> bool:
        header = fmt.unpack_header(raw_header)
        return (
            header is not None
            and header.ref == ref
            and header.payload_bytes == self.page_bytes
            and header.payload_checksum == fmt.checksum(buffer)
        )

    # ---- writing
    def _write_chunk(
        self, refs: Sequence[PageRef], buffers: Sequence[memoryview]
    ) -> list[FailReason | None]:
        outcomes, wanted = self._books.begin_writes(refs)
        places: list[Place] = []
        written: list[tuple[PageRef, Place, int]] = []
        orphans: set[bytes] = set()
        try:
            places, shortage = self._places.take(len(wanted))
            for position in wanted[len(places) :]:
                outcomes[position] = shortage
            positions = wanted[: len(places)]
            ticks = self._books.next_ticks(len(positions))
            batch = WriteBatch(
                self._space,
                [refs[position] for position in positions],
                [buffers[position] for position in positions],
                places,
                ticks,
            )
            batch.write(self._crew, self._run_pages, sync=self.sync)
            self._places.lose_segments(batch.gone_segments)
            for i, position in enumerate(positions):
                outcomes[position] = batch.failures.get(i)
                if i not in batch.failures:
                    written.append((refs[position], places[i], ticks[i]))
        finally:
            orphans, unused = self._books.end_writes([refs[i] for i in wanted], written)
            taken = {place for _, place, _ in written}
            self._places.free([p for p in reversed(places) if p not in taken] + unused)
        segments = self._space.segments
        gone = {place.segment for place in places if place.segment not in segments}
        self._places.lose_segments(gone)  # deleted underneath meanwhile, seen by another thread
        for i, position in enumerate(positions):
            if refs[position].key in orphans:
                outcomes[position] = FailReason.ORPHANED
            if places[i].segment in gone:
                outcomes[position] = FailReason.STORAGE
        return outcomes

    # ---- life
    @contextlib.contextmanager
    def _call(self) -> Iterator[bool]:
        """Around every call that touches files; False when the store is closed."""
        with self._state:
            if self._closing:
                running = False
            else:
                running = True
                self._running_calls += 1
        try:
            yield running
        finally:
            if running:
                with self._state:
                    self._running_calls -= 1
                    if self._closing and self._running_calls == 0:
                        self._release()
                        self._state.notify_all()

    def _release(self) -> None:
        if self._released:
            return
        self._released = True
        try:
            self._places.clear_again()
            self._save_recency()
        finally:
            self._crew.close()
            self._space.close()
            self._directory.release()

    def _save_recency(self) -> None:
        used_at = {
            number: np.zeros(segment.slots, np.uint64)
            for number, segment in self._space.segments.items()
        }
        for entry in self._books.index.pages.values():
            used_at[entry.place.segment][entry.place.slot] = entry.used_at
        for number, ticks in used_at.items():
            segment = self._space.segments[number]
            try:
                segment.write_recency(ticks)
            except OSError as error:  # a hint: without it pages age by their time of writing
                _log.warning("%s: recency is not kept: %s", segment.path, error)


def _check_refs(refs: Sequence[PageRef]) -> None:
    for ref in refs:
        if ref.identity and (len(ref.identity) != fmt.KEY_BYTES or not any(ref.identity)):
            raise StorageError(
                f"a page has an identity of {len(ref.identity)} bytes; identities have "
                f"{fmt.KEY_BYTES} bytes, not all of them zero, or none (kvtiers.storage.keys makes "
                "them)"
            )
        parent_bytes = fmt.KEY_BYTES if ref.depth else 0
        if len(ref.key) != fmt.KEY_BYTES or len(ref.parent) != parent_bytes:
            raise StorageError(
                f"a page at depth {ref.depth} has a key of {len(ref.key)} and a parent of "
                f"{len(ref.parent)} bytes; keys have {fmt.KEY_BYTES} bytes, and the parent none at "
                "depth 0 (kvtiers.storage.keys makes them)"
            )
