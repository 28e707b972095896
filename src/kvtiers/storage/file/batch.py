"""One batch of pages on its way to disk: first the pages, then the headers that make them findable.

Owns the order of the writes and what becomes of a failure; knows nothing of the index. A page whose
parent failed in an earlier piece fails with it (`ORPHANED`), before its header is written; what
still has no parent when the batch is entered into the index is sorted out there.
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
        self._failed_keys: set[bytes] = set()

    def write(self, crew: Crew, run_pages: int, *, sync: bool) -> None:
        """Afterwards every page that is not in `failures` is found by the next open."""
        pieces = self._runs(range(len(self._refs)), run_pages)
        # Checksums and headers are the caller's work: a helper that does anything else keeps the
        # disk waiting. A header is written as soon as its page and all before it are there.
        crew.each(
            self._write_pages,
            pieces,
            meanwhile=self._compute_checksums,
            then=None if sync else self._publish,
        )
        if sync:
            self._each_segment(Segment.sync)
            for piece in pieces:
                self._publish(piece)
            self._each_segment(Segment.sync)

    def _publish(self, piece: Sequence[int]) -> None:
        """Write the headers of a piece, those before it being there already.

        In order of position, so that a crash in between leaves no page without its parent.
        """
        for position in piece:  # parents come before their children
            ref = self._refs[position]
            if ref.depth and ref.parent in self._failed_keys and position not in self.failures:
                self.failures[position] = FailReason.ORPHANED
                self._failed_keys.add(ref.key)
        whole = [position for position in piece if position not in self.failures]
        for positions in self._runs(whole, len(whole)):
            self._write_headers(positions)

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
    def _runs(self, positions: Sequence[int], longest: int) -> list[Sequence[int]]:
        """`positions` in pieces that are neighbours on disk."""
        places = [self._places[position] for position in positions]
        return [positions[run.start : run.stop] for run in runs(places, longest)]

    def _each_segment(self, step: Callable[[Segment], None]) -> None:
        by_segment: dict[int, list[int]] = {}
        for position, place in enumerate(self._places):
            if position not in self.failures:
                by_segment.setdefault(place.segment, []).append(position)
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
            self._failed_keys.update(self._refs[position].key for position in positions)
