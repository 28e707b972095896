"""What no fact can tell: sizes and ages that the live parts are asked for at scrape time.

Owns the form of the answer only. Whoever runs the parts (the server, the planner, a test) fills
one in; nothing here is counted, so nothing here takes part in an identity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from kvtiers.types import Purpose, Tier


class WhatIfSize(StrEnum):
    """An imagined size of a tier, as a multiple of the one it has."""

    HALF = "x0.5"
    SAME = "x1"
    DOUBLE = "x2"
    FOURFOLD = "x4"

    @property
    def factor(self) -> float:
        return float(self[1:])


class RecordOutcome(StrEnum):
    """What became of a request in the trace that a server records."""

    RECORDED = "recorded"
    LEFT_OUT = "left_out"
    LOST = "lost"


WhatIfRatios: TypeAlias = Mapping[tuple[Tier, WhatIfSize], float]
"""Share of prompt tokens found in a tier or above it, were the tier of that size."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """One look at the live parts. Sizes are pages of the anchor pool unless their name says else.

    `leased_pages` are resident pages, by tier, that a lease, a pin or a copy holds; the other
    resident ones are evictable. `host_mirror_pages` are resident on host and on device both.
    `namespace_pages` is keyed by tier and alias: of the largest namespaces, and `other`.
    `oldest_transfer_age_seconds` lists the purposes that have a copy in flight.
    `storage_quota_bytes` 0 means no quota. `recorded_requests` are sums that the recording keeps.
    """

    leased_pages: Mapping[Tier, int] = field(default_factory=dict)
    host_mirror_pages: int = 0
    ghost_pages: int = 0
    ghost_capacity_pages: int = 0
    namespace_pages: Mapping[tuple[str, Tier], int] = field(default_factory=dict)
    running_requests: int = 0
    queued_requests: int = 0
    oldest_transfer_age_seconds: Mapping[Purpose, float] = field(default_factory=dict)
    link_ceiling_bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    storage_used_bytes: int = 0
    storage_quota_bytes: int = 0
    what_if: WhatIfRatios = field(default_factory=dict)
    recorded_requests: Mapping[RecordOutcome, int] = field(default_factory=dict)


GaugeSource: TypeAlias = Callable[[], Gauges]
"""Called once per scrape, from the scraper's thread; must not block."""
