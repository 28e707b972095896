"""The server's side of the story: counters from /metrics, balance from /cache/ledger."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvtiers.demo.client import DemoError

PREFIX = "sglang:"
MODES = ("input", "device_hit", "host_hit", "storage_hit")
SETTLE_SECONDS_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Counters:
    """Sums over all labels but the one that is split by, at one moment."""

    effective_tokens: dict[str, int]
    backup_tokens: int
    backup_bytes: int
    backup_seconds: float
    load_back_tokens: int
    load_back_bytes: int
    load_back_seconds: float
    prefetched_tokens: int
    stored_tokens: int
    evicted_tokens: int
    dropped_tokens: dict[str, int]

    def since(self, earlier: Counters) -> Counters:
        """What was counted in between."""
        return Counters(
            {m: n - earlier.effective_tokens[m] for m, n in self.effective_tokens.items()},
            self.backup_tokens - earlier.backup_tokens,
            self.backup_bytes - earlier.backup_bytes,
            self.backup_seconds - earlier.backup_seconds,
            self.load_back_tokens - earlier.load_back_tokens,
            self.load_back_bytes - earlier.load_back_bytes,
            self.load_back_seconds - earlier.load_back_seconds,
            self.prefetched_tokens - earlier.prefetched_tokens,
            self.stored_tokens - earlier.stored_tokens,
            self.evicted_tokens - earlier.evicted_tokens,
            {r: n - earlier.dropped_tokens.get(r, 0) for r, n in self.dropped_tokens.items()},
        )


async def read_counters(http: httpx.AsyncClient) -> Counters:
    """One scrape of /metrics."""
    response = await http.get("/metrics")
    response.raise_for_status()
    values: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            values.setdefault(sample.name, []).append((sample.labels, sample.value))

    def by(name: str, label: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for labels, value in _samples(values, name):
            found[labels[label]] = found.get(labels[label], 0) + int(value)
        return found

    def total(name: str) -> float:
        return sum(value for _, value in _samples(values, name))

    return Counters(
        by("prefill_effective_tokens_total", "mode"),
        int(total("hicache_backup_tokens_total")),
        int(total("hicache_backup_bytes_total")),
        total("hicache_backup_duration_seconds_sum"),
        int(total("load_back_tokens_total")),
        int(total("load_back_bytes_total")),
        total("load_back_duration_seconds_sum"),
        int(total("prefetched_tokens_total")),
        int(total("backuped_tokens_total")),
        int(total("evicted_tokens_total")),
        by("hicache_dropped_tokens_total", "reason"),
    )


def _samples(
    values: dict[str, list[tuple[dict[str, str], float]]], name: str
) -> list[tuple[dict[str, str], float]]:
    try:
        return values[PREFIX + name]
    except KeyError:
        raise DemoError(f"/metrics has no series {PREFIX}{name}") from None


async def is_balanced(http: httpx.AsyncClient) -> bool:
    """Whether every identity holds, after a full recount."""
    response = await http.get("/cache/ledger")
    response.raise_for_status()
    return bool(response.json()["balanced"])


async def settle(http: httpx.AsyncClient) -> None:
    """Wait until no copy is in flight, so that an act's backups and stores are its own."""
    give_up = time.monotonic() + SETTLE_SECONDS_MAX
    while time.monotonic() < give_up:
        response = await http.get("/cache/state")
        response.raise_for_status()
        copies = response.json()["copies"].values()
        if not any(copy["in_flight_tokens"] for copy in copies):
            return
        await asyncio.sleep(0.05)
    raise DemoError(f"copies were still in flight {SETTLE_SECONDS_MAX:g} s after the last answer")
