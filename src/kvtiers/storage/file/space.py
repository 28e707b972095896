"""The slots of a `file` store: its segments, which slots are free, and how far it may grow.

Owns the segment files of one directory and the quota. Knows nothing of which page is in a slot, or
which one should leave.

Invariants, at every moment and after every crash:

    used_bytes <= quota_bytes                    (checked before a file grows, never after)
    a free slot's header on disk is all zeros    (a crash cannot bring a page back)

Files that this store cannot read pages from (another page size, another format, a damaged
superblock) are *foreign*: they count towards the quota, are never read, and are removed, oldest
first, when the space is needed. A file that cannot even be opened is none: the store refuses.

Nothing that may hang on a disk is done under the lock that `used_bytes` takes.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import logging
import threading
import time
from pathlib import Path
from typing import NamedTuple

from kvtiers.errors import ConfigError, StorageError
from kvtiers.storage.file.directory import DIRECTORY_OVERHEAD_BYTES, StoreDirectory, segment_files
from kvtiers.storage.file.format import ALIGN_BYTES, Geometry, UnreadableSegment, round_up
from kvtiers.storage.file.segment import Segment

_log = logging.getLogger("kvtiers.storage")

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}
_GROW_AGAIN_SECONDS = 5.0
_SMALLEST_SHARE = 16
"""On a nearly full disk a segment may be this many times smaller than configured, not less."""

_SEGMENTS_PER_SIZE = 64
"""Without a quota, segments double in size after so many of them; with one, they are larger from
the start. Each costs two file descriptors, of which a process may have 1,024 by default."""

_EXTENT_BYTES_PER_SLOT = 64
"""What the file system itself may need to remember where a slot is (ext4: two extents of 12 bytes,
in leaves that are at worst half full)."""


class Place(NamedTuple):
    """Where a page is. Places sort in the order in which they lie on disk."""

    segment: int
    slot: int


def is_disk_full(error: OSError) -> bool:
    return error.errno in _NO_SPACE


def usual_segment_bytes(quota_bytes: int) -> int:
    """An eighth of the quota, between 64 MiB and 1 GiB, as long as 128 files are enough for it."""
    if not quota_bytes:
        return 1 << 30
    return max(quota_bytes // 128, min(1 << 30, max(64 << 20, quota_bytes // 8)))


def segment_cost_bytes(geometry: Geometry) -> int:
    """What a segment takes from the quota: the file, and what the file system keeps about it."""
    return geometry.file_bytes + round_up(geometry.slots * _EXTENT_BYTES_PER_SLOT)


class SlotSpace:
    """Segments and free slots of one store. Safe between threads."""

    def __init__(
        self,
        directory: StoreDirectory,
        page_bytes: int,
        quota_bytes: int,
        segment_bytes: int,
        *,
        sync: bool = False,
    ) -> None:
        self.quota_bytes = quota_bytes
        self.page_bytes = page_bytes
        self.segments: dict[int, Segment] = {}
        self.damaged_segments = 0
        self._directory = directory
        self._sync = sync
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._free: list[Place] = []
        self._costs: dict[int, int] = {}
        self._foreign: dict[int, tuple[Path, int]] = {}
        self._last_number = 0
        self._grow_after = 0.0
        self._geometry = self._plan_segment(segment_bytes)
        for number, path in segment_files(directory.path).items():
            self._last_number = number
            self._adopt(number, path)
        if self._foreign:
            _log.warning(
                "%s: %d of its files (%.1f GiB) hold pages of another size or format; they are of "
                "no use here, and are removed as room is needed",
                directory.path,
                len(self._foreign),
                sum(cost_bytes for _, cost_bytes in self._foreign.values()) / 2**30,
            )

    @property
    def used_bytes(self) -> int:
        """Everything the directory takes on disk, overhead included."""
        with self._lock:
            return self._used_bytes()

    # ---- slots
    def give(self, places: list[Place]) -> None:
        """Slots whose headers were cleared are free; those of forgotten segments are not."""
        with self._lock:
            for place in places:
                if place.segment in self.segments:
                    heapq.heappush(self._free, place)

    def take(self, count: int) -> list[Place]:
        """Up to `count` free slots, lowest first, so that neighbours stay together."""
        with self._lock:
            return [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]

    def grow(self) -> bool:
        """Whether there are more free slots now, by a new segment. Raises `OSError` for trouble.

        A full disk is no trouble but a smaller quota: False. After either there is no new attempt
        for five seconds, just False.
        """
        with self._growing:
            with self._lock:
                if self._free:
                    return True
                number = self._last_number + 1
            if time.monotonic() < self._grow_after:
                return False
            try:
                self._directory.check_ours()
                return self._create_segment(number, self._affordable())
            except OSError:
                self._grow_after = time.monotonic() + _GROW_AGAIN_SECONDS
                raise

    def _create_segment(self, number: int, geometry: Geometry) -> bool:
        """A new segment of that size, or of a smaller one where the disk is nearly full."""
        if geometry.slots < 1:
            return False
        smallest_slots = max(1, self._geometry.slots // _SMALLEST_SHARE) if self.segments else 1
        slots = geometry.slots
        while slots >= min(smallest_slots, geometry.slots):
            fitting = Geometry(self.page_bytes, slots)
            try:
                path = self._directory.segment_path(number)
                segment = Segment.create(path, fitting, sync=self._sync)
            except OSError as error:
                if not is_disk_full(error):
                    raise
                slots //= 2
                continue
            self._take_in(number, segment, segment_cost_bytes(fitting))
            self.give([Place(number, slot) for slot in range(slots)])
            return True
        self._grow_after = time.monotonic() + _GROW_AGAIN_SECONDS
        _log.warning(
            "the disk of %s is full: the store stays at %d bytes (its quota is %d)",
            self._directory.path,
            self.used_bytes,
            self.quota_bytes,
        )
        return False

    # ---- segments
    def forget(self, number: int) -> bool:
        """The segment's file is gone: its slots are nobody's. False: that was known.

        Another owner's file may have its name by now, so nothing is unlinked.
        """
        with self._lock:
            known = self._close_slots(number)
            if known:
                del self._costs[number]
            return known

    def remove(self, number: int) -> None:
        """Give the segment's file back; nobody uses its slots. Counted until the disk has it."""
        with self._lock:
            segment = self.segments[number]
            self._close_slots(number)
        self._directory.check_ours()
        segment.path.unlink(missing_ok=True)
        with self._lock:
            del self._costs[number]

    def remove_foreign(self) -> int:
        """Remove all files that this store cannot read; returns how many bytes they took."""
        return sum(self._remove_foreign(number) for number in list(self._foreign))

    def excess_bytes(self) -> int:
        """By how much a lowered quota is exceeded, foreign files having been removed for it."""
        if not self.quota_bytes:
            return 0
        for number in list(self._foreign):
            if self.used_bytes <= self.quota_bytes:
                break
            self._remove_foreign(number)
        return max(0, self.used_bytes - self.quota_bytes)

    def cost_bytes(self, number: int) -> int:
        return self._costs[number]

    def close(self) -> None:
        for segment in self.segments.values():
            segment.close()

    # ---- how
    def _close_slots(self, number: int) -> bool:
        """Hold the lock. False: there is no such segment."""
        if self.segments.pop(number, None) is None:
            return False
        self._free = [place for place in self._free if place.segment != number]
        heapq.heapify(self._free)
        return True

    def _plan_segment(self, segment_bytes: int) -> Geometry:
        """The usual segment: an even share of the quota, so that the last one is no scrap."""
        if self.quota_bytes:
            room_bytes = self.quota_bytes - DIRECTORY_OVERHEAD_BYTES
            least_bytes = segment_cost_bytes(Geometry(self.page_bytes, 1))
            if room_bytes < least_bytes:
                raise ConfigError(
                    f"a storage quota of {self.quota_bytes} bytes cannot hold one page of "
                    f"{self.page_bytes} bytes with its overhead; the least is "
                    f"{least_bytes + DIRECTORY_OVERHEAD_BYTES} bytes, or 0 for no limit"
                )
            segment_bytes = room_bytes // -(-room_bytes // segment_bytes)
        geometry = _costing(self.page_bytes, segment_bytes)
        return geometry if geometry.slots else Geometry(self.page_bytes, 1)

    def _affordable(self) -> Geometry:
        """The segment that the quota has room for now, foreign files making way for it."""
        usual = self._geometry
        if not self.quota_bytes:
            return Geometry(
                self.page_bytes, usual.slots << len(self.segments) // _SEGMENTS_PER_SIZE
            )
        for number in list(self._foreign):
            if self.quota_bytes - self.used_bytes >= segment_cost_bytes(usual):
                break
            self._remove_foreign(number)
        room_bytes = self.quota_bytes - self.used_bytes
        if room_bytes >= segment_cost_bytes(usual):
            return usual
        return _costing(self.page_bytes, room_bytes)

    def _adopt(self, number: int, path: Path) -> None:
        try:
            segment = Segment.open(path, writable=True)
        except UnreadableSegment as error:
            self.damaged_segments += error.damaged
            reason = str(error)
        except FileNotFoundError:
            return  # it went between the listing and now
        except OSError as error:
            # Nothing is known of its pages, so it must neither count as free space nor go.
            raise StorageError(
                f"{path} cannot be opened ({error}); a store is opened whole or not at all. "
                f"{_way_out(error)}"
            ) from error
        else:
            if segment.geometry.page_bytes == self.page_bytes:
                path.chmod(0o600)
                extent_bytes = segment_cost_bytes(segment.geometry) - segment.geometry.file_bytes
                self._take_in(number, segment, segment.file_bytes + extent_bytes)
                return
            reason = f"its pages have {segment.geometry.page_bytes} bytes, not {self.page_bytes}"
            segment.close()
        _log.info("%s is kept while there is room, and not read: %s", path, reason)
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            self._foreign[number] = (path, max(status.st_size, status.st_blocks * 512))

    def _take_in(self, number: int, segment: Segment, cost_bytes: int) -> None:
        with self._lock:
            is_first_refusal = segment.direct_io_refusal is not None and not any(
                other.direct_io_refusal for other in self.segments.values()
            )
        if is_first_refusal:
            _log.warning(
                "%s: no direct I/O here (%s); pages go through the page cache, which costs memory "
                "and, on most disks, speed",
                self._directory.path,
                segment.direct_io_refusal,
            )
        with self._lock:
            self.segments[number] = segment
            self._costs[number] = cost_bytes
            self._last_number = max(self._last_number, number)

    def _remove_foreign(self, number: int) -> int:
        """Bytes that were given back; the file counts until the disk has it."""
        with self._lock:
            path, cost_bytes = self._foreign.get(number, (None, 0))
        if path is None:
            return 0
        try:
            self._directory.check_ours()
            path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("%s is in the way and cannot be removed: %s", path, error)
            return 0
        _log.info("%s was removed: its space is needed", path)
        with self._lock:
            return cost_bytes if self._foreign.pop(number, None) else 0

    def _used_bytes(self) -> int:
        foreign_bytes = sum(cost_bytes for _, cost_bytes in self._foreign.values())
        return DIRECTORY_OVERHEAD_BYTES + sum(self._costs.values()) + foreign_bytes


def _costing(page_bytes: int, room_bytes: int) -> Geometry:
    """The largest segment that costs at most `room_bytes`; it may have no slot at all."""
    geometry = Geometry.fitting(page_bytes, room_bytes)
    while geometry.slots and segment_cost_bytes(geometry) > room_bytes:
        over_bytes = segment_cost_bytes(geometry) - room_bytes
        slots = geometry.slots - max(1, over_bytes // (geometry.slot_bytes + ALIGN_BYTES))
        geometry = Geometry(page_bytes, max(0, slots))
    return geometry


def _way_out(error: OSError) -> str:
    if error.errno in _NO_DESCRIPTORS:
        return "Raise the limit on open files (ulimit -n): each of its files needs two"
    return "See to the file, or move it out of the directory to do without its pages"
