"""What a replay came to, as numbers under names: for JSON, for the terminal, for the plan.

Owns no counter: hits, copies and losses are read from the ledger, times from the requests' ends.
The hit ratio is the curve's definition `tokens`, over requests that were served.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from kvtiers.planner.flows import LINKS, coarsened
from kvtiers.planner.replay import ReplayResult, ServedRequest
from kvtiers.types import LOSS_REASONS, RequestOutcome, Tier

PERCENTILES = (50, 90, 95, 99)
SECONDS_PER_DAY = 86_400.0

COMPUTE_LIMIT_SHARE = 0.9
"""A machine that prefills for more than this share of the time has hardly any left to give."""
LINK_LIMIT_SHARE = 0.9
"""A link whose mean rate over the replay is above this share of its ceiling holds others up."""

_POINTS = 200
_SERVED = (RequestOutcome.LENGTH, RequestOutcome.STOP)


def distribution(values: Iterable[float | None]) -> dict[str, float] | None:
    """Mean, percentiles and number of the values there are; None for none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    numbers = np.percentile(known, PERCENTILES)
    named = {f"p{p}": float(v) for p, v in zip(PERCENTILES, numbers, strict=True)}
    return {"count": len(known), "mean": float(np.mean(known)), **named, "max": max(known)}


def main_source(request: ServedRequest) -> str:
    """Where most of a prompt came from: a tier, or `computed`."""
    split = request.split
    if split is None:
        return "unserved"
    parts = {
        "device": split.device_hit,
        "host": split.host_hit,
        "storage": split.storage_hit,
        "computed": split.computed,
    }
    return max(parts, key=lambda name: parts[name])


def summarise(result: ReplayResult) -> dict[str, Any]:
    """Everything worth saying about a replay, as plain JSON."""
    requests = result.requests
    span = max(result.seconds, 1e-9)
    flows = {link: _flow(result, link, span) for link in LINKS.values()}
    return {
        "machine": {
            "name": result.config.machine.name,
            "status": result.config.machine.status,
            "cost": asdict(result.config.machine.cost),
        },
        "configuration": configuration(result),
        "requests": {
            "served": sum(r.outcome in _SERVED for r in requests),
            "refused": sum(r.outcome is RequestOutcome.REFUSED for r in requests),
            "of": len(requests),
            "waiting_at_last_arrival": result.waiting_at_last_arrival,
            "retracted": result.ledger.requests.retracted,
        },
        "hits": hits(result),
        "missed_tokens": {
            str(reason): tokens
            for reason, tokens in result.ledger.first.missed_tokens.items()
            if tokens
        },
        "ttft_seconds": distribution(r.ttft_seconds for r in requests),
        "e2e_seconds": distribution(r.e2e_seconds for r in requests if r.ttft_seconds is not None),
        "queued_seconds": distribution(r.queued_seconds for r in requests),
        "ttft_seconds_by_source": _ttft_by_source(requests),
        "compute": {
            "virtual_seconds": result.seconds,
            "busy_share": result.busy_seconds / span,
            "prefill_share": result.prefill_seconds / span,
            "waiting_for_layers_seconds": result.stall_seconds,
            "steps": result.steps,
        },
        "links": flows,
        "losses": losses(result),
        "storage": {
            "held_pages": result.storage_held_pages,
            "written_bytes": result.storage_written_pages * result.ledger.page_bytes,
            "written_bytes_per_day": result.storage_written_pages
            * result.ledger.page_bytes
            / span
            * SECONDS_PER_DAY,
        },
        "limits": limits(result),
        "series": {
            "bytes_per_second": {
                link: dict(
                    zip(
                        ("seconds", "values"),
                        coarsened(result.flows.bytes_by_link[link], _POINTS),
                        strict=True,
                    )
                )
                for link in LINKS.values()
            },
            "waiting": dict(
                zip(("seconds", "values"), coarsened(result.flows.waiting, _POINTS), strict=True)
            ),
            "running": dict(
                zip(("seconds", "values"), coarsened(result.flows.running, _POINTS), strict=True)
            ),
        },
        "ledger": result.ledger.to_dict(),
    }


def configuration(result: ReplayResult) -> dict[str, Any]:
    """Tiers, policies and limits of a replay; sizes in tokens and bytes."""
    cache, scheduler = result.config.cache, result.config.scheduler
    page_bytes = result.ledger.page_bytes
    storage_pages = result.config.storage_pages if cache.storage else 0
    storage_tokens = storage_pages * cache.page_tokens
    return {
        "page_tokens": cache.page_tokens,
        "kv_bytes_per_token": page_bytes // cache.page_tokens,
        "device_tokens": cache.device_pages * cache.page_tokens,
        "host_tokens": cache.host_pages * cache.page_tokens,
        "storage_tokens": "inf" if storage_pages == float("inf") else int(storage_tokens),
        "device_bytes": cache.device_pages * page_bytes,
        "host_bytes": cache.host_pages * page_bytes,
        "storage_bytes": "inf" if storage_pages == float("inf") else storage_pages * page_bytes,
        "write_policy": cache.write_policy.value,
        "retention": cache.retention.value,
        "store_on": cache.store_on.value,
        "eviction": cache.eviction,
        "prefetch_policy": cache.prefetch_policy.value,
        "prefetch_threshold_tokens": cache.prefetch_threshold_tokens,
        "max_running_requests": scheduler.max_running,
        "max_batch_tokens": scheduler.max_step_tokens,
        "speed": result.config.speed,
    }


def hits(result: ReplayResult) -> dict[str, Any]:
    """Prompt tokens of first admissions by where they came from, and the ratios of each."""
    first = result.ledger.first
    tokens = {
        "device": first.device_hit_tokens,
        "host": first.host_hit_tokens,
        "storage": first.storage_hit_tokens,
        "computed": first.computed_tokens,
    }
    prompt = sum(tokens.values())
    ratios = {name: count / max(1, prompt) for name, count in tokens.items()}
    return {
        "definition": "tokens",
        "denominator": prompt,
        "tokens": tokens,
        "ratios": ratios,
        "hit_ratio": 1.0 - ratios["computed"] if prompt else 0.0,
    }


def losses(result: ReplayResult) -> dict[str, Any]:
    """What left its last tier, and how much of it was asked for again, in tokens."""
    ledger = result.ledger
    dropped: dict[str, int] = {}
    for tier in (Tier.DEVICE, Tier.HOST):
        for (outcome, reason), pages in ledger.tiers[tier].left_pages.items():
            if pages and outcome.value == "dropped":
                dropped[f"{tier}/{reason}"] = pages * ledger.page_tokens
    lost = sum(
        pages * ledger.page_tokens
        for (outcome, reason), pages in ledger.device.left_pages.items()
        if outcome.value == "dropped" and reason in LOSS_REASONS
    )
    return {
        "dropped_tokens": dropped,
        "lost_tokens": lost,
        "regret_tokens": {
            f"{tier}/{reason}": tokens
            for (tier, reason), tokens in ledger.regret_tokens.items()
            if tokens
        },
        "failed_copy_pages": {
            str(purpose): sum(book.failed_by_reason.values())
            for purpose, book in ledger.copies.items()
            if sum(book.failed_by_reason.values())
        },
    }


def limits(result: ReplayResult) -> list[str]:
    """What holds this configuration up, most binding first; empty: nothing does."""
    found = []
    span = max(result.seconds, 1e-9)
    share = result.prefill_seconds / span
    if share > COMPUTE_LIMIT_SHARE:
        found.append(f"compute: prefilling {100 * share:.0f} % of the time")
    for link in LINKS.values():
        used = result.flows.total_bytes(link) / span / ceiling(result, link)
        if used > LINK_LIMIT_SHARE:
            found.append(f"{link}: {100 * used:.0f} % of its ceiling on average")
    late = result.ledger.store.late_pages + result.ledger.prefetch.late_pages
    failed = sum(sum(book.failed_by_reason.values()) for book in result.ledger.copies.values())
    if late or failed:
        found.append(f"copies that missed their deadline or failed: {late + failed:,} pages")
    return found


def ceiling(result: ReplayResult, link: str) -> float:
    """What a link can carry, in bytes per second."""
    value: float = getattr(result.config.machine, link).bytes_per_second
    return value


def _flow(result: ReplayResult, link: str, span: float) -> dict[str, float]:
    total = result.flows.total_bytes(link)
    top = ceiling(result, link)
    peak = result.flows.peak_bytes_per_second(link)
    return {
        "bytes": total,
        "mean_bytes_per_second": total / span,
        "peak_bytes_per_second": peak,
        "ceiling_bytes_per_second": top,
        "peak_share": peak / top,
    }


def _ttft_by_source(requests: Sequence[ServedRequest]) -> dict[str, Any]:
    by_source: dict[str, list[float]] = {}
    for request in requests:
        if request.ttft_seconds is not None:
            by_source.setdefault(main_source(request), []).append(request.ttft_seconds)
    return {source: distribution(values) for source, values in sorted(by_source.items())}
