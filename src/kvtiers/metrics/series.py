"""What a series is: its type, its labels, and the words and values that several share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvtiers.metrics.identities import IDENTITY_NAMES
from kvtiers.types import Attempt, Purpose, Tier

ANCHOR = "kv"
"""The pool whose slots facts count in. Pools that follow it are in bytes, never in tokens."""

COMMON_LABELS = ("model_name", "tp_rank", "pp_rank", "dp_rank")
"""On every series, before the operator's own and the series' labels."""


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Group(StrEnum):
    """The chapters of the catalogue."""

    MISSION = "Hits, copies and losses"
    STORAGE = "Storage"
    OCCUPANCY = "Occupancy"
    INSIGHT = "Why, where and what for"
    REQUESTS = "Requests"


@dataclass(frozen=True, slots=True)
class Label:
    """A label; `values` are all it can have, or empty when the deployment decides (`open_set`)."""

    name: str
    values: tuple[str, ...] = ()
    open_set: str = ""

    def __post_init__(self) -> None:
        assert bool(self.values) != bool(self.open_set), f"label {self.name}: closed or open, once"


@dataclass(frozen=True, slots=True)
class Series:
    """One family of time series.

    `help` says what is counted and when; `unit` what one step of the value means; `identities`
    name the identities (`kvtiers.metrics.identities`) that the counted books take part in.
    """

    name: str
    kind: Kind
    group: Group
    unit: str
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    identities: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert (self.kind is Kind.HISTOGRAM) == bool(self.buckets), f"{self.name}: buckets"
        assert (self.kind is Kind.COUNTER) == self.name.endswith("_total"), f"{self.name}: _total"
        unknown = set(self.identities) - set(IDENTITY_NAMES)
        assert not unknown, f"{self.name} names identities that do not exist: {unknown}"

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)

    def help_text(self) -> str:
        """The help line of the exposition: unit, meaning, identity."""
        if not self.identities:
            books = ""
        elif self.identities == IDENTITY_NAMES:
            books = " Identities: all."
        else:
            books = f" Identities: {', '.join(self.identities)}."
        return f"[{self.unit}] {self.help}{books}"


def closed(name: str, values: Iterable[str]) -> Label:
    return Label(name, tuple(str(value) for value in values))


SLOT_TIERS = (Tier.DEVICE, Tier.HOST)
HIT_MODES = ("input", "device_hit", "host_hit", "storage_hit")
SLOT_VIEWS = ("free", "reserved", "private", "leased", "evictable", "quarantined")
ATTEMPT_ENDS = ("planned", "booked", "voided", "aborted")

POOL = closed("pool", (ANCHOR,))
TIER = closed("tier", SLOT_TIERS)
PURPOSE = closed("purpose", Purpose)
BACKEND = Label("backend", open_set="names of the stores attached since the start")

ATTEMPTS = tuple(f"attempts_{attempt}" for attempt in Attempt)
COPIES = tuple(f"copies_{purpose}" for purpose in Purpose)
