"""A histogram with fixed buckets and integer counts.

Owns the bucket boundaries of every histogram in the catalogue and how a sample finds its bucket.
Knows nothing of what is measured. Invariant: `sum(counts) == samples`.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import Any

COPY_SECONDS = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007, 0.008, 0.009, 0.01),
    *(0.02, 0.03, 0.04, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0),
)
"""Copies and evictions: fine where a tier hides latency, up to a minute where it cannot."""

STAGE_SECONDS = (0.00001, 0.00003, 0.0001, 0.0003, *COPY_SECONDS)
"""Stages of a copy: waiting for a worker is often far below a millisecond."""

STORAGE_SECONDS = (
    *(0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
    *(1.0, 3.0, 10.0, 30.0, 60.0),
)
REQUEST_SECONDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0),
)
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
PAGES_PER_CALL = (1.0, 5.0, 10.0, 50.0, 100.0)
GIGABYTES_PER_SECOND = (0.1, 0.5, 1.0, 5.0, 10.0, 50.0, 100.0)


class Histogram:
    """Counts of samples at or below each bound, and above the last; and their sum."""

    __slots__ = ("bounds", "counts", "samples", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        assert bounds, "a histogram needs at least one bound"
        assert list(bounds) == sorted(set(bounds)), f"bounds must rise: {bounds}"
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.samples = 0
        self.total = 0.0

    def observe(self, value: float, samples: int = 1) -> None:
        """Count `samples` samples of `value`; a value equal to a bound is within it."""
        self.counts[bisect_left(self.bounds, value)] += samples
        self.samples += samples
        self.total += value * samples

    def copy(self) -> Histogram:
        """The same counts, apart from what this histogram counts from now on."""
        twin = Histogram(self.bounds)
        twin.counts = self.counts.copy()
        twin.samples = self.samples
        twin.total = self.total
        return twin

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound, samples at or below it) in rising order, the last bound being `+Inf`."""
        labels = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(labels, accumulate(self.counts), strict=True))

    def to_dict(self) -> dict[str, Any]:
        return {"samples": self.samples, "sum": self.total}
