"""One batch of pages on its way to disk: first the pages, then the headers that make them findable.

Owns the order of the writes and what becomes of a failure; knows nothing of the index. A page whose
parent failed in the same batch fails with it (`ORPHANED`): no look-up could reach it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from kvtiers.storage.file import format as fmt
from kvtiers.storage.file.crew import Crew
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
        self._checksums: list[bytes] = []

    def write(self, crew: Crew, run_pages: int, *, sync: bool) -> None:
        """Afterwards every page that is not in `failures` is found by the next open."""
        # The checksums are the caller's work: a helper that computes keeps the disk waiting.
        crew.each(self._write_pages, self._runs(run_pages), meanwhile=self._compute_checksums)
        if sync:
            self._each_segment(Segment.sync)
        self._fail_descendants()
        # In order of position: a crash in between leaves no page without its parent.
        for positions in self._runs(run_pages):
            self._write_headers(positions)
        if sync:
            self._each_segment(Segment.sync)
        self._fail_descendants()

    def _write_pages(self, positions: Sequence[int]) -> None:
        buffers = [self._buffers[position] for position in positions]
        first = self._places[positions[0]]
        self._attempt(positions, lambda segment: segment.write_pages(first.slot, buffers))

    def _compute_checksums(self) -> None:
        self._checksums = [fmt.checksum(buffer) for buffer in self._buffers]

    def _write_headers(self, positions: Sequence[int]) -> None:
        stored_at = int(time.time())
        headers = [
            fmt.PageHeader(
                self._refs[position],
                self._buffers[position].nbytes,
                self._sequences[position],
                stored_at,
                self._checksums[position],
            )
            for position in positions
        ]
        raw = b"".join(map(fmt.pack_header, headers))
        first = self._places[positions[0]]
        self._attempt(positions, lambda segment: segment.write_headers(first.slot, raw))

    # ---- how
    def _whole(self) -> list[int]:
        return [position for position in range(len(self._refs)) if position not in self.failures]

    def _runs(self, run_pages: int) -> list[list[int]]:
        """The positions of whole pages, in pieces that are neighbours on disk."""
        whole = self._whole()
        places = [self._places[position] for position in whole]
        return [whole[run.start : run.stop] for run in runs(places, run_pages)]

    def _each_segment(self, step: Callable[[Segment], None]) -> None:
        by_segment: dict[int, list[int]] = {}
        for position in self._whole():
            by_segment.setdefault(self._places[position].segment, []).append(position)
        for positions in by_segment.values():
            self._attempt(positions, step)

    def _attempt(self, positions: Sequence[int], step: Callable[[Segment], None]) -> None:
        """Do `step` with the one segment of these pages; what goes wrong is theirs."""
        number = self._places[positions[0]].segment
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
