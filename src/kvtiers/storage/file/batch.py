"""One batch of pages on its way to disk: first the pages, then the headers that make them findable.

Owns the order of the writes and what becomes of a failure; knows nothing of the index. A page whose
parent failed in the same batch fails with it (`ORPHANED`): no look-up could reach it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from kvtiers.storage.file import format as fmt
from kvtiers.storage.file.runs import runs
from kvtiers.storage.file.segment import Segment, SegmentGone
from kvtiers.storage.file.space import Place, SlotSpace, is_disk_full
from kvtiers.storage.port import PageRef
from kvtiers.types import FailReason

_log = logging.getLogger("kvtiers.storage")


class WriteBatch:
    """Pages, the places they go to (in disk order), and what failed so far, by position."""

    def __init__(
        self,
        space: SlotSpace,
        refs: Sequence[PageRef],
        buffers: Sequence[memoryview],
        places: Sequence[Place],
        sequences: Sequence[int],
    ) -> None:
        self.failures: dict[int, FailReason] = {}
        self.gone_segments: set[int] = set()
        self._space = space
        self._refs = refs
        self._buffers = buffers
        self._places = places
        self._sequences = sequences

    def write(self, run_pages: int, *, sync: bool) -> None:
        """Afterwards every page that is not in `failures` is found by the next open."""
        for step in (self._write_pages, self._write_headers):
            self._each_run(step, run_pages)
            if sync:
                self._each_segment(Segment.sync)
            self._fail_descendants()

    def _write_pages(self, segment: Segment, slot: int, positions: Sequence[int]) -> None:
        segment.write_pages(slot, [self._buffers[position] for position in positions])

    def _write_headers(self, segment: Segment, slot: int, positions: Sequence[int]) -> None:
        stored_at = int(time.time())
        headers = [
            fmt.PageHeader(
                self._refs[position],
                self._buffers[position].nbytes,
                self._sequences[position],
                stored_at,
                fmt.checksum(self._buffers[position]),
            )
            for position in positions
        ]
        segment.write_headers(slot, b"".join(map(fmt.pack_header, headers)))

    # ---- how
    def _whole(self) -> list[int]:
        return [position for position in range(len(self._refs)) if position not in self.failures]

    def _each_run(
        self, step: Callable[[Segment, int, Sequence[int]], None], run_pages: int
    ) -> None:
        whole = self._whole()
        for run in runs([self._places[position] for position in whole], run_pages):
            positions = whole[run.start : run.stop]
            first = self._places[positions[0]]

            def write_run(
                segment: Segment, slot: int = first.slot, positions: Sequence[int] = positions
            ) -> None:
                step(segment, slot, positions)

            self._attempt(first.segment, positions, write_run)

    def _each_segment(self, step: Callable[[Segment], None]) -> None:
        by_segment: dict[int, list[int]] = {}
        for position in self._whole():
            by_segment.setdefault(self._places[position].segment, []).append(position)
        for number, positions in by_segment.items():
            self._attempt(number, positions, step)

    def _attempt(
        self, number: int, positions: Sequence[int], step: Callable[[Segment], None]
    ) -> None:
        segment = self._space.segments.get(number)
        reason: FailReason | None = None
        if segment is None:  # another thread has just found it deleted
            reason = FailReason.STORAGE
        else:
            try:
                step(segment)
            except SegmentGone:
                self.gone_segments.add(number)
                reason = FailReason.STORAGE
            except OSError as error:
                reason = FailReason.QUOTA if is_disk_full(error) else FailReason.STORAGE
                _log.warning("%s: %d pages not written: %s", segment.path, len(positions), error)
        if reason is not None:
            self.failures.update(dict.fromkeys(positions, reason))

    def _fail_descendants(self) -> None:
        if not self.failures:
            return
        failed_keys = {self._refs[position].key for position in self.failures}
        for position in self._whole():  # parents come before their children
            ref = self._refs[position]
            if ref.depth and ref.parent in failed_keys:
                self.failures[position] = FailReason.ORPHANED
                failed_keys.add(ref.key)
