"""What went over each link and how many requests waited, second by second.

Owns two kinds of series over virtual time: bytes per link, spread evenly over the time that each
copy took, and averages of levels (requests waiting and running) weighted by time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtiers.events import Fact, FactTuple
from kvtiers.types import Purpose

BIN_SECONDS = 1.0

LINKS: Mapping[Purpose, str] = {
    Purpose.BACKUP: "device_to_host",
    Purpose.LOAD_BACK: "host_to_device",
    Purpose.PREFETCH: "storage_read",
    Purpose.STORE: "storage_write",
}
"""The link that copies of each purpose go over, by the name it has in `Machine`."""


@dataclass(slots=True)
class Flows:
    """Series by bin of `BIN_SECONDS`; bins that nothing happened in are missing."""

    bytes_by_link: dict[str, dict[int, float]] = field(
        default_factory=lambda: {link: defaultdict(float) for link in LINKS.values()}
    )
    waiting: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    running: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Request-seconds per bin."""

    def take(self, facts: list[FactTuple], now: float, page_bytes: int) -> None:
        """Book the copies between device and host that `facts` tell of, at the time `now`."""
        for fact in facts:
            if fact[0] is Fact.COPY_TIMED:
                _, purpose, pages, _, copy_seconds, ack_seconds = fact
                if copy_seconds is not None and purpose in (Purpose.BACKUP, Purpose.LOAD_BACK):
                    end = now - (ack_seconds or 0.0)
                    self.book(LINKS[purpose], end - copy_seconds, end, pages * page_bytes)

    def book(self, link: str, start: float, end: float, num_bytes: float) -> None:
        """`num_bytes` went over a link between two moments, evenly."""
        series = self.bytes_by_link[link]
        for index, share in _bins(max(0.0, start), end):
            series[index] += share * num_bytes

    def levels(self, since: float, until: float, waiting: int, running: int) -> None:
        """So many requests waited and ran from `since` to `until`."""
        if not waiting and not running:  # hours of it, between the requests of a quiet trace
            return
        for index, share in _bins(since, until):
            seconds = share * (until - since)
            self.waiting[index] += waiting * seconds
            self.running[index] += running * seconds

    def peak_bytes_per_second(self, link: str) -> float:
        """The most bytes that any one bin saw, per second."""
        return max(self.bytes_by_link[link].values(), default=0.0) / BIN_SECONDS

    def total_bytes(self, link: str) -> float:
        return sum(self.bytes_by_link[link].values())


def coarsened(series: Mapping[int, float], points: int) -> tuple[list[float], list[float]]:
    """A series as at most `points` averages per second: times (middle of each), values."""
    if not series:
        return [], []
    last = max(series)
    width = max(1, math.ceil((last + 1) / points))
    sums = [0.0] * (last // width + 1)
    for index, value in series.items():
        sums[index // width] += value
    times = [(i + 0.5) * width * BIN_SECONDS for i in range(len(sums))]
    return times, [value / (width * BIN_SECONDS) for value in sums]


def _bins(start: float, end: float) -> list[tuple[int, float]]:
    """The bins that `[start, end)` touches, each with its share of it."""
    first, last = int(start / BIN_SECONDS), int(end / BIN_SECONDS)
    if first == last or end <= start:
        return [(last, 1.0)]
    span = end - start
    bins = [(first, ((first + 1) * BIN_SECONDS - start) / span)]
    bins += [(index, BIN_SECONDS / span) for index in range(first + 1, last)]
    rest = end - last * BIN_SECONDS
    if rest > 0:
        bins.append((last, rest / span))
    return bins
