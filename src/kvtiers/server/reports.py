"""The ledger and the engine's queues as the admin API reports them.

Everything is read in one call on the engine's thread, between two steps, so that the numbers of a
report belong together. Nothing is counted here: each number is a sum over the ledger's books.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from kvtiers.metrics.books import CopyBook, TierBook
from kvtiers.metrics.gauges import WhatIfRatios
from kvtiers.metrics.identities import IDENTITIES
from kvtiers.metrics.ledger import Ledger
from kvtiers.server.context import ServerContext
from kvtiers.server.recording import Recording
from kvtiers.server.responses import (
    CacheState,
    CopyState,
    Identity,
    LedgerReport,
    RecordingState,
    StorageState,
    TierState,
)
from kvtiers.storage.port import StoreStats
from kvtiers.types import LOSS_REASONS, LeaveOutcome


def ledger_report(context: ServerContext) -> LedgerReport:
    """Every identity with both sides, after a full recount of the cache's structure."""

    def read(parts: Any) -> LedgerReport:
        ledger: Ledger = parts.ledger
        ledger.audit(parts.cache.recount())
        identities = [
            Identity(
                name=identity.name,
                formula=identity.formula(),
                left=_side(ledger, identity.left),
                right=_side(ledger, identity.right),
                because=identity.because,
            )
            for identity in IDENTITIES
        ]
        return LedgerReport(
            balanced=all(each.left == each.right for each in identities), identities=identities
        )

    return context.engine.call_in_loop(read).result()


def cache_state(context: ServerContext) -> CacheState:
    """What `kvtiers top` shows."""
    engine, config = context.engine, context.engine.config

    def read(parts: Any) -> CacheState:
        ledger: Ledger = parts.ledger
        first = ledger.first
        return CacheState(
            model=engine.model_name,
            namespace=engine.namespace().alias,
            page_tokens=config.page_tokens,
            kv_bytes_per_token=engine.kv_bytes_per_token,
            context_tokens=engine.context_tokens,
            policies={
                "write_policy": config.write_policy,
                "retention": config.retention,
                "store_on": config.store_on,
                "eviction": config.eviction,
                "prefetch_policy": config.prefetch_policy,
                "schedule_policy": config.schedule_policy,
            },
            limits={
                "max_running_requests": config.max_running_requests,
                "max_waiting_requests": config.max_waiting_requests,
                "max_batch_tokens": config.max_batch_tokens,
                "prefetch_threshold_tokens": config.prefetch_threshold_tokens,
                "load_back_threshold_tokens": config.load_back_threshold_tokens,
            },
            device=_tier(ledger, ledger.device),
            host=_tier(ledger, ledger.host),
            storage=_storage(parts.store_stats(), parts.store_name),
            running_requests=parts.running_requests,
            waiting_requests=parts.waiting_requests,
            pinned_tokens=ledger.pinned_tokens,
            pin_budget_tokens=context.pins.budget_tokens,
            prefill_tokens={
                "input": first.input_tokens,
                "device_hit": first.device_hit_tokens,
                "host_hit": first.host_hit_tokens,
                "storage_hit": first.storage_hit_tokens,
            },
            missed_tokens={str(reason): n for reason, n in first.missed_tokens.items()},
            dropped_tokens=_dropped(ledger),
            copies={str(purpose): _copies(ledger, book) for purpose, book in ledger.copies.items()},
            what_if=_by_tier(parts.what_if.ratios()),
            recording=_recording(context.recording),
            uptime_seconds=time.monotonic() - context.started_at,
            draining=context.draining,
            balanced=not any(ledger.imbalances().values()),
        )

    return engine.call_in_loop(read).result()


def _side(ledger: Ledger, terms: Sequence[str]) -> int:
    values = (attrgetter(term)(ledger) for term in terms)
    return sum(value if isinstance(value, int) else sum(value.values()) for value in values)


def _tier(ledger: Ledger, book: TierBook) -> TierState:
    used_pages = book.capacity_pages - book.free
    return TierState(
        capacity_pages=book.capacity_pages,
        pages={str(state): pages for state, pages in book.states().items()},
        used_tokens=used_pages * ledger.page_tokens,
        used_bytes=used_pages * ledger.page_bytes,
    )


def _copies(ledger: Ledger, book: CopyBook) -> CopyState:
    return CopyState(
        ok_tokens=book.ok_pages * ledger.page_tokens,
        ok_bytes=book.ok_pages * ledger.page_bytes,
        failed_tokens=book.failed_pages * ledger.page_tokens,
        in_flight_tokens=book.in_flight_pages * ledger.page_tokens,
        busy_seconds=book.copy_seconds.total,
    )


def _dropped(ledger: Ledger) -> dict[str, int]:
    return {
        str(reason): ledger.page_tokens
        * sum(book.left_pages[LeaveOutcome.DROPPED, reason] for book in ledger.tiers.values())
        for reason in LOSS_REASONS
    }


def _by_tier(ratios: WhatIfRatios) -> dict[str, dict[str, float]]:
    by_tier: dict[str, dict[str, float]] = {}
    for (tier, size), ratio in ratios.items():
        by_tier.setdefault(tier, {})[size] = ratio
    return by_tier


def _storage(stats: StoreStats | None, name: str | None) -> StorageState:
    if stats is None:
        stats = StoreStats(0, 0, 0, 0, 0)
    return StorageState(
        attached=name is not None,
        backend=name,
        pages=stats.pages,
        used_bytes=stats.used_bytes,
        quota_bytes=stats.quota_bytes,
        evicted_pages=stats.evicted_pages,
        integrity_failures=stats.integrity_failures,
    )


def _recording(recording: Recording | None) -> RecordingState | None:
    if recording is None:
        return None
    state = recording.state
    requests = {str(outcome): number for outcome, number in state.requests.items()}
    return RecordingState(requests=requests, problem=state.problem)
