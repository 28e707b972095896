"""Capacities as people write them, in blocks as the curve counts them.

A partial last block takes a whole block of memory, so tokens and bytes are those of whole blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvtiers.errors import ConfigError

GIB = 1 << 30

PAGES_MAX = 50_000_000
"""Of a tier that is replayed: each page is kept account of, in some tens of bytes."""


class CapacityUnit(StrEnum):
    """What a capacity is counted in."""

    BLOCKS = "blocks"
    TOKENS = "tokens"
    GIB = "gib"


@dataclass(frozen=True, slots=True)
class CapacityScale:
    """How many of a unit one block of the trace is; `kv_bytes_per_token` is needed for GiB."""

    unit: CapacityUnit
    block_tokens: int
    kv_bytes_per_token: int | None = None

    def __post_init__(self) -> None:
        if self.unit is CapacityUnit.GIB and self.kv_bytes_per_token is None:
            raise ConfigError(
                "capacities in GiB need the KV bytes of a token: give --model NAME, "
                "--model CONFIG.JSON or --kv-bytes-per-token N"
            )

    @property
    def units_per_block(self) -> float:
        if self.unit is CapacityUnit.BLOCKS:
            return 1.0
        if self.unit is CapacityUnit.TOKENS:
            return float(self.block_tokens)
        return self.block_tokens * (self.kv_bytes_per_token or 0) / GIB

    def blocks(self, capacity: float) -> float:
        """Whole blocks that fit into a capacity of this unit; `inf` stays."""
        if math.isinf(capacity):
            return capacity
        return float(math.floor(capacity / self.units_per_block * (1 + 1e-12)))

    def capacity(self, blocks: float) -> float:
        """A number of blocks in this unit."""
        return blocks * self.units_per_block


def size_text(size_bytes: float) -> str:
    """Bytes of memory for people: KiB, MiB or GiB, the largest of which there is one."""
    return _text(size_bytes, ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")))


def decimal_text(size_bytes: float) -> str:
    """Bytes that moved, for people: kB to TB, as drives and links are sold."""
    return _text(size_bytes, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")))


def gib_text(gib: float) -> str:
    """GiB for people, as `size_text`."""
    return size_text(gib * GIB)


def enough_text(least: float) -> str:
    """The least that is enough, in three digits rounded up: as printed, it is enough."""
    step = 10.0 ** (math.floor(math.log10(least)) - 2)
    return f"{math.ceil(least / step) * step:.3g}"


def _text(size_bytes: float, units: Sequence[tuple[float, str]]) -> str:
    if math.isinf(size_bytes):
        return "inf"
    for unit, name in units:
        if size_bytes >= unit:
            number = size_bytes / unit
            return f"{number:,.0f} {name}" if number >= 100 else f"{number:.3g} {name}"
    return f"{size_bytes:,.0f} bytes"


def parse_capacities(text: str, flag: str = "--capacities") -> list[float]:
    """`1000,2e6,inf` as numbers in the order given; raises `ConfigError` for anything else."""
    capacities = []
    for part in text.replace("_", "").split(","):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if math.isnan(value) or value < 0:
            raise ConfigError(
                f"{flag}: '{part.strip()}' is not a number of at least 0; write for example "
                "1000,20000"
            )
        capacities.append(value)
    return capacities
