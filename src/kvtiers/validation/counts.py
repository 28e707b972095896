"""The books of either side as numbers under the same names, read from the same exposition.

The live server's come from its /metrics; a replay's ledger goes through the exporter that the
server uses. So no number of the comparison is defined twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvtiers.errors import ProtocolError
from kvtiers.metrics.gauges import Gauges
from kvtiers.metrics.ledger import Ledger
from kvtiers.metrics.prometheus import DEFAULT_PREFIX, PrometheusExporter

TIERS = ("device", "host", "storage")
"""Where a hit may come from, the deepest last."""
COMPUTED = "computed"


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens since a server's start. `prompt_tokens` has one entry per tier and `computed`."""

    prompt_tokens: dict[str, int]
    backed_up_tokens: int
    loaded_back_tokens: int
    stored_tokens: int
    prefetched_tokens: int
    evicted_tokens: int
    dropped_tokens: dict[str, int]
    retracted_requests: int

    @property
    def all_prompt_tokens(self) -> int:
        return sum(self.prompt_tokens.values())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def counts_of_exposition(text: str) -> Counts:
    """What a scrape of /metrics says. Raises `ProtocolError` for a series that is missing."""
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def of(name: str) -> list[tuple[Mapping[str, str], float]]:
        if DEFAULT_PREFIX + name not in samples:
            raise ProtocolError(f"/metrics has no series {DEFAULT_PREFIX}{name}")
        return samples[DEFAULT_PREFIX + name]

    def total(name: str) -> int:
        return int(sum(value for _, value in of(name)))

    def by(name: str, label: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for labels, value in of(name):
            found[labels[label]] = found.get(labels[label], 0) + int(value)
        return found

    effective = by("prefill_effective_tokens_total", "mode")
    return Counts(
        prompt_tokens={
            **{tier: effective[f"{tier}_hit"] for tier in TIERS},
            COMPUTED: effective["input"],
        },
        backed_up_tokens=total("hicache_backup_tokens_total"),
        loaded_back_tokens=total("load_back_tokens_total"),
        stored_tokens=total("backuped_tokens_total"),
        prefetched_tokens=total("prefetched_tokens_total"),
        evicted_tokens=total("evicted_tokens_total"),
        dropped_tokens=by("hicache_dropped_tokens_total", "reason"),
        retracted_requests=total("num_retracted_requests_total"),
    )


def counts_of_ledger(ledger: Ledger) -> Counts:
    """What the same server would expose over this ledger."""
    exporter = PrometheusExporter(ledger, Gauges, model_name="replay")
    return counts_of_exposition(exporter.render().decode())
