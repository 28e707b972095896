"""From books and gauges to the values of every series in the catalogue.

Owns, for each series, where its value stands. Knows no exposition format; the server's live page
and the Prometheus collector read the same samples. Tokens and bytes of pages are computed here.
Invariant: one reader per series, and each reader gives a sample for every closed label value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from kvtiers.metrics.books import TierBook
from kvtiers.metrics.catalogue import CATALOGUE
from kvtiers.metrics.gauges import Gauges, RecordOutcome, WhatIfSize
from kvtiers.metrics.histogram import Histogram
from kvtiers.metrics.identities import IDENTITIES
from kvtiers.metrics.ledger import Ledger
from kvtiers.metrics.series import ANCHOR, SLOT_TIERS, Series
from kvtiers.types import LOSS_REASONS, OTHER_NAMESPACES, FailReason, LeaveOutcome, Tier

Value: TypeAlias = int | float | Histogram
Sample: TypeAlias = tuple[tuple[str, ...], Value]
"""Label values in the order of the series' labels, and what they have counted."""
Reader: TypeAlias = Callable[[Ledger, Gauges], Iterable[Sample]]


_EVICTIONS = (LeaveOutcome.DEMOTED, LeaveOutcome.COVERED, LeaveOutcome.DROPPED)


def read_all(ledger: Ledger, gauges: Gauges) -> list[tuple[Series, list[Sample]]]:
    """Every series with its samples, from one moment between two folds.

    Histograms are copies, so that a reader can take its time without holding up the ledger.
    """
    with ledger.lock:
        return [
            (series, [_frozen(sample) for sample in READERS[series.name](ledger, gauges)])
            for series in CATALOGUE
        ]


def _frozen(sample: Sample) -> Sample:
    labels, value = sample
    return (labels, value.copy()) if isinstance(value, Histogram) else sample


# ---- forms that many series share


def _one(value: Callable[[Ledger], Value]) -> Reader:
    return lambda ledger, gauges: [((), value(ledger))]


def _gauge(value: Callable[[Gauges], Value]) -> Reader:
    return lambda ledger, gauges: [((), value(gauges))]


def _anchor_tokens(pages: Callable[[Ledger], int]) -> Reader:
    return lambda ledger, gauges: [((ANCHOR,), pages(ledger) * ledger.page_tokens)]


# ---- readers that need more than a line


def _effective(ledger: Ledger, gauges: Gauges) -> Iterator[Sample]:
    first = ledger.first
    yield ("input",), first.input_tokens
    yield ("device_hit",), first.device_hit_tokens
    yield ("host_hit",), first.host_hit_tokens
    yield ("storage_hit",), first.storage_hit_tokens


def _dropped(ledger: Ledger, gauges: Gauges) -> Iterator[Sample]:
    for reason in LOSS_REASONS:
        pages = sum(book.left_pages[LeaveOutcome.DROPPED, reason] for book in ledger.tiers.values())
        yield (reason, ANCHOR), pages * ledger.page_tokens


def _left(ledger: Ledger, gauges: Gauges) -> Iterator[Sample]:
    for tier, book in ledger.tiers.items():
        for (outcome, reason), pages in book.left_pages.items():
            yield (tier, ANCHOR, outcome, reason), pages * ledger.page_tokens


def _leased(book: TierBook, gauges: Gauges) -> int:
    # The cache moves on while a scrape reads: keep its answer within what the books hold now.
    return max(0, min(gauges.leased_pages.get(book.tier, 0), book.resident))


def _slots(ledger: Ledger, gauges: Gauges) -> Iterator[Sample]:
    for tier, book in ledger.tiers.items():
        leased = _leased(book, gauges)
        yield (tier, ANCHOR, "free"), book.free
        yield (tier, ANCHOR, "reserved"), book.reserved
        yield (tier, ANCHOR, "private"), book.private
        yield (tier, ANCHOR, "leased"), leased
        yield (tier, ANCHOR, "evictable"), book.resident - leased
        yield (tier, ANCHOR, "quarantined"), book.quarantined


def _used_device_pages(ledger: Ledger, gauges: Gauges) -> int:
    device = ledger.device
    return device.capacity_pages - device.free - (device.resident - _leased(device, gauges))


def _used_tokens(ledger: Ledger, gauges: Gauges) -> list[Sample]:
    return [((), _used_device_pages(ledger, gauges) * ledger.page_tokens)]


def _token_usage(ledger: Ledger, gauges: Gauges) -> list[Sample]:
    return [((), _used_device_pages(ledger, gauges) / ledger.device.capacity_pages)]


def _host_mirrors(ledger: Ledger, gauges: Gauges) -> list[Sample]:
    return [((ANCHOR,), gauges.host_mirror_pages * ledger.page_tokens)]


def _namespaces(ledger: Ledger, gauges: Gauges) -> Iterator[Sample]:
    none = {(OTHER_NAMESPACES, tier): 0 for tier in SLOT_TIERS}
    for labels, pages in {**none, **gauges.namespace_pages}.items():
        yield labels, pages * ledger.page_tokens


def _what_if(ledger: Ledger, gauges: Gauges) -> Iterator[Sample]:
    for tier in Tier:
        for size in WhatIfSize:
            yield (tier, size), gauges.what_if.get((tier, size), 0.0)


def _imbalances(ledger: Ledger, gauges: Gauges) -> Iterator[Sample]:
    for identity in IDENTITIES:
        yield (identity.name,), identity.imbalance(ledger)


def _attempts(ledger: Ledger, gauges: Gauges) -> Iterator[Sample]:
    for attempt, book in ledger.attempts.items():
        yield (attempt, "planned"), book.planned
        yield (attempt, "booked"), book.booked
        yield (attempt, "voided"), book.voided
        yield (attempt, "aborted"), book.aborted


def _declined(ledger: Ledger, gauges: Gauges) -> Iterator[Sample]:
    for purpose, book in ledger.copies.items():
        for reason, pages in book.declined_pages.items():
            yield (purpose, reason), pages * ledger.page_tokens


def _failed(ledger: Ledger, gauges: Gauges) -> Iterator[Sample]:
    for purpose, book in ledger.copies.items():
        for reason, pages in book.failed_by_reason.items():
            yield (purpose, reason), pages * ledger.page_tokens


def _in_flight(ledger: Ledger, gauges: Gauges) -> Iterator[Sample]:
    for purpose, book in ledger.copies.items():
        yield (purpose,), len(book.in_flight_by_op)


def _oldest(ledger: Ledger, gauges: Gauges) -> Iterator[Sample]:
    for purpose in ledger.copies:
        yield (purpose,), gauges.oldest_transfer_age_seconds.get(purpose, 0.0)


def _stages(ledger: Ledger, gauges: Gauges) -> Iterator[Sample]:
    for purpose, book in ledger.copies.items():
        for stage, histogram in book.stage_seconds.items():
            yield (purpose, stage), histogram


def _storage_errors(ledger: Ledger, gauges: Gauges) -> Iterator[Sample]:
    for name, book in ledger.calls.backends.items():
        for (op, kind), calls in book.errors.items():
            yield (name, op, kind), calls


def _storage_seconds(ledger: Ledger, gauges: Gauges) -> Iterator[Sample]:
    for name, book in ledger.calls.backends.items():
        for op, histogram in book.op_seconds.items():
            yield (name, op), histogram


def _integrity(ledger: Ledger, gauges: Gauges) -> Iterator[Sample]:
    for name, book in ledger.calls.backends.items():
        yield (name,), book.errors_of(FailReason.INTEGRITY)


def _cached(ledger: Ledger, gauges: Gauges) -> Iterator[Sample]:
    yield (Tier.DEVICE,), ledger.requests.device_hit_tokens
    yield (Tier.HOST,), ledger.requests.host_hit_tokens
    yield (Tier.STORAGE,), ledger.requests.storage_hit_tokens


READERS: dict[str, Reader] = {
    "prefill_effective_tokens_total": _effective,
    "hicache_backup_tokens_total": _anchor_tokens(lambda ledger: ledger.backup.ok_pages),
    "backup_reused_tokens_total": _anchor_tokens(lambda ledger: ledger.backup_reused_pages),
    "hicache_backup_bytes_total": _one(lambda led: led.backup.ok_pages * led.page_bytes),
    "hicache_backup_duration_seconds": _one(lambda ledger: ledger.backup.copy_seconds),
    "load_back_tokens_total": _anchor_tokens(lambda ledger: ledger.load_back.ok_pages),
    "load_back_bytes_total": _one(lambda led: led.load_back.ok_pages * led.page_bytes),
    "load_back_duration_seconds": _one(lambda ledger: ledger.load_back.copy_seconds),
    "hicache_dropped_tokens_total": _dropped,
    "evicted_tokens_total": _one(
        lambda led: sum(led.device.left_by(how) for how in _EVICTIONS) * led.page_tokens
    ),
    "eviction_duration_seconds": _one(lambda ledger: ledger.eviction_seconds),
    "prefetched_tokens_total": _one(lambda led: led.prefetch.ok_pages * led.page_tokens),
    "backuped_tokens_total": _one(lambda led: led.store.ok_pages * led.page_tokens),
    "storage_prefetch_hit_tokens_total": _one(lambda ledger: ledger.asked.found_tokens),
    "storage_prefetch_unfulfilled_tokens_total": lambda ledger, gauges: [
        ((reason,), tokens) for reason, tokens in ledger.asked.unused_tokens.items()
    ],
    "prefetch_pgs": _one(lambda ledger: ledger.calls.read_pages),
    "backup_pgs": _one(lambda ledger: ledger.calls.write_pages),
    "prefetch_bandwidth": _one(lambda ledger: ledger.calls.read_gbps),
    "backup_bandwidth": _one(lambda ledger: ledger.calls.write_gbps),
    "storage_errors_total": _storage_errors,
    "storage_op_duration_seconds": _storage_seconds,
    "storage_integrity_failures_total": _integrity,
    "storage_used_bytes": _gauge(lambda gauges: gauges.storage_used_bytes),
    "storage_quota_bytes": _gauge(lambda gauges: gauges.storage_quota_bytes),
    "tier_slots": _slots,
    "host_mirror_tokens": _host_mirrors,
    "hicache_host_used_tokens": _one(
        lambda led: (led.host.capacity_pages - led.host.free) * led.page_tokens
    ),
    "hicache_host_total_tokens": _one(lambda led: led.host.capacity_pages * led.page_tokens),
    "num_used_tokens": _used_tokens,
    "token_usage": _token_usage,
    "page_size": _one(lambda ledger: ledger.page_tokens),
    "ghost_pages": _gauge(lambda gauges: gauges.ghost_pages),
    "ghost_capacity_pages": _gauge(lambda gauges: gauges.ghost_capacity_pages),
    "pinned_tokens": _one(lambda ledger: ledger.pinned_tokens),
    "num_running_reqs": _gauge(lambda gauges: gauges.running_requests),
    "num_queue_reqs": _gauge(lambda gauges: gauges.queued_requests),
    "namespace_tokens": _namespaces,
    "what_if_hit_ratio": _what_if,
    "ledger_imbalance": _imbalances,
    "ledger_audits_total": _one(lambda ledger: ledger.audits),
    "tier_evicted_tokens_total": _left,
    "regret_tokens_total": lambda ledger, gauges: list(ledger.regret_tokens.items()),
    "prefill_missed_tokens_total": lambda ledger, gauges: [
        ((reason,), tokens) for reason, tokens in ledger.first.missed_tokens.items()
    ],
    "admission_attempts_total": _attempts,
    "admission_blocked_total": lambda ledger, gauges: [
        ((on,), attempts) for on, attempts in ledger.requests.blocked.items()
    ],
    "load_back_joined_tokens_total": _one(
        lambda ledger: sum(book.joined_tokens for book in ledger.attempts.values())
    ),
    "copies_declined_tokens_total": _declined,
    "copies_failed_tokens_total": _failed,
    "transfers_in_flight": _in_flight,
    "oldest_transfer_age_seconds": _oldest,
    "transfer_stage_seconds": _stages,
    "forward_stall_seconds_total": _one(lambda ledger: ledger.forward_stall_seconds),
    "prefill_seconds_saved_total": lambda ledger, gauges: [
        ((tier,), seconds) for tier, seconds in ledger.savings.seconds.items()
    ],
    "link_ceiling_bytes_per_second": lambda ledger, gauges: [
        ((path,), speed) for path, speed in gauges.link_ceiling_bytes_per_second.items()
    ],
    "time_to_first_token_seconds": _one(lambda ledger: ledger.requests.first_token_seconds),
    "inter_token_latency_seconds": _one(lambda ledger: ledger.requests.inter_token_seconds),
    "e2e_request_latency_seconds": _one(lambda ledger: ledger.requests.end_to_end_seconds),
    "prompt_tokens_total": _one(lambda ledger: ledger.requests.prompt_tokens),
    "generation_tokens_total": _one(lambda ledger: ledger.requests.output_tokens),
    "cached_tokens_total": _cached,
    "requests_total": lambda ledger, gauges: [
        ((outcome,), requests) for outcome, requests in ledger.requests.ended.items()
    ],
    "recorded_requests_total": lambda ledger, gauges: [
        ((outcome,), gauges.recorded_requests.get(outcome, 0)) for outcome in RecordOutcome
    ],
    "requests_too_large_total": _one(lambda ledger: ledger.requests.refused),
    "num_retracted_requests_total": _one(lambda ledger: ledger.requests.retracted),
    "num_retracted_tokens_total": _one(lambda ledger: ledger.requests.retracted_tokens),
}

assert set(READERS) == {series.name for series in CATALOGUE}, "one reader per series"
