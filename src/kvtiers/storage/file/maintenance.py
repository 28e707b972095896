"""Looking into a store directory from outside: what is in it, is it whole, what can be given back.

`survey` and `check` only read and need no lock, so they may look at a directory in use; what the
owner changes meanwhile is looked at again before it is called damaged. `reclaim` owns the directory
while it runs. Nothing here knows of command lines or tables.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kvtiers.errors import StorageError
from kvtiers.storage.file import format as fmt
from kvtiers.storage.file.directory import StoreDirectory, owner_process, segment_files
from kvtiers.storage.file.segment import Segment
from kvtiers.storage.file.store import FileStore
from kvtiers.storage.index import reachable_keys


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """One segment file. `problem` says why nothing can be read from it, if so.

    With `unopened` that is not known to be the file's fault: it could not be looked into.
    """

    path: Path
    file_bytes: int
    page_bytes: int = 0
    slots: int = 0
    headers: dict[int, fmt.PageHeader] = field(default_factory=dict)
    broken_slots: tuple[int, ...] = ()
    problem: str | None = None
    damaged: bool = False
    unopened: bool = False


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that cannot be read any more: a slot of a file, or the whole file (slot None)."""

    path: Path
    slot: int | None
    what: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    checked_pages: int
    checked_bytes: int
    unreachable_pages: int
    damages: tuple[Damage, ...]


@dataclass(frozen=True, slots=True)
class ReclaimReport:
    """What `reclaim` dropped and gave back, over all page sizes of the directory."""

    damaged_pages: int
    unreachable_pages: int
    removed_files: int
    freed_bytes: int


def survey(directory: Path) -> list[SegmentReport]:
    """Every segment of a store directory, from its tables alone; no page is read.

    Raises `StorageError` when `directory` is no store.
    """
    _require_store(directory)
    reports = []
    for path in segment_files(directory).values():
        with contextlib.suppress(FileNotFoundError):  # its owner has just given it back
            reports.append(_survey_segment(path))
    return reports


def owner(directory: Path) -> int | None:
    """The process that writes to the store now, or None."""
    return owner_process(directory)


def check(directory: Path, progress: Callable[[int], None] = lambda pages: None) -> CheckReport:
    """Read and verify every page. `progress` is told the pages checked so far, now and then."""
    damages: list[Damage] = []
    headers: list[fmt.PageHeader] = []
    checked_pages = checked_bytes = 0
    for report in survey(directory):
        if report.problem is not None:
            if report.damaged:
                damages.append(Damage(report.path, None, report.problem))
            continue
        damages += [Damage(report.path, slot, "header") for slot in report.broken_slots]
        with contextlib.suppress(FileNotFoundError):  # its owner has just given it back
            for slot, problem in _verify(report):
                if problem is not None:
                    damages.append(Damage(report.path, slot, problem))
                else:
                    headers.append(report.headers[slot])
                checked_pages += 1
                checked_bytes += report.page_bytes
                if checked_pages % 256 == 0:
                    progress(checked_pages)
    progress(checked_pages)
    reachable = reachable_keys(header.ref for header in headers)
    unreachable_pages = sum(header.ref.key not in reachable for header in headers)
    return CheckReport(checked_pages, checked_bytes, unreachable_pages, tuple(damages))


def reclaim(directory: Path) -> ReclaimReport:
    """Drop damaged and unreachable pages and unreadable files; give back segments not needed.

    Raises `StorageLocked` while another process owns the directory, and `StorageError` when a file
    cannot be looked into: nothing is removed then.
    """
    _require_store(directory)
    removed_files = freed_bytes = 0
    lock = StoreDirectory.acquire(directory)
    try:
        reports = survey(directory)
        for report in reports:
            if report.unopened:
                raise StorageError(
                    f"{report.path} cannot be looked into ({report.problem}); nothing was removed: "
                    "see to the file, or move it away to do without its pages"
                )
        for report in reports:
            if report.problem is not None:
                report.path.unlink(missing_ok=True)
                removed_files += 1
                freed_bytes += report.file_bytes
    finally:
        lock.release()
    damaged_pages = sum(len(report.broken_slots) for report in reports)
    unreachable_pages = 0
    for page_bytes in sorted({report.page_bytes for report in reports if report.problem is None}):
        files_before = len(segment_files(directory))
        with FileStore(directory, page_bytes) as store:
            reclaimed = store.reclaim()
        removed_files += files_before - len(segment_files(directory))
        damaged_pages += reclaimed.damaged_pages
        unreachable_pages += reclaimed.unreachable_pages
        freed_bytes += reclaimed.freed_bytes
    return ReclaimReport(damaged_pages, unreachable_pages, removed_files, freed_bytes)


def _require_store(directory: Path) -> None:
    if not directory.is_dir() or not (segment_files(directory) or (directory / "LOCK").exists()):
        raise StorageError(f"{directory} is not a kvtiers store: it has no segments and no lock")


def _survey_segment(path: Path) -> SegmentReport:
    file_bytes = path.stat().st_size
    try:
        segment = Segment.open(path, writable=False)
        try:
            headers, broken = fmt.unpack_header_table(segment.read_header_table())
        finally:
            segment.close()
    except fmt.UnreadableSegment as error:
        return SegmentReport(path, file_bytes, problem=str(error), damaged=error.damaged)
    except FileNotFoundError:
        raise
    except OSError as error:
        return SegmentReport(path, file_bytes, problem=str(error), damaged=True, unopened=True)
    page_bytes = segment.geometry.page_bytes
    return SegmentReport(path, file_bytes, page_bytes, segment.slots, headers, tuple(broken))


def _verify(report: SegmentReport) -> Iterable[tuple[int, str | None]]:
    """Every page of the segment, with what is wrong with it."""
    segment = Segment.open(report.path, writable=False)
    try:
        with mmap.mmap(-1, fmt.round_up(report.page_bytes)) as aligned:
            buffer = memoryview(aligned)[: report.page_bytes]
            try:
                for slot, header in report.headers.items():
                    problem = _verify_page(segment, slot, header, buffer)
                    if problem is None or not _has_changed(segment, slot, header):
                        yield slot, problem
            finally:
                buffer.release()
    finally:
        segment.close()


def _verify_page(
    segment: Segment, slot: int, header: fmt.PageHeader, buffer: memoryview
) -> str | None:
    if header.payload_bytes != segment.geometry.page_bytes:
        return "length"
    try:
        segment.read_pages(slot, [buffer])
    except OSError as error:
        return str(error)
    return None if fmt.checksum(buffer) == header.payload_checksum else "payload"


def _has_changed(segment: Segment, slot: int, header: fmt.PageHeader) -> bool:
    """Whether a live store has put something else into the slot since the header was read."""
    try:
        return fmt.unpack_header(segment.read_headers(slot, 1)) != header
    except OSError:
        return False
