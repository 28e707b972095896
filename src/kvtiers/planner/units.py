"""Capacities as people write them, in blocks as the curve counts them.

A partial last block takes a whole block of memory, so tokens and bytes are those of whole blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from kvtiers.errors import ConfigError

GIB = 1 << 30


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


def parse_capacities(text: str) -> list[float]:
    """`1000,2e6,inf` as numbers in the order given; raises `ConfigError` for anything else."""
    capacities = []
    for part in text.replace("_", "").split(","):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if math.isnan(value) or value < 0:
            raise ConfigError(
                f"capacity '{part.strip()}' is not a number of at least 0; write for example "
                "1000,20000,inf"
            )
        capacities.append(value)
    return capacities
