"""Storage: what was asked of it, what came of it, and how its calls went."""

from __future__ import annotations

from kvtiers.metrics.histogram import GIGABYTES_PER_SECOND, PAGES_PER_CALL, STORAGE_SECONDS
from kvtiers.metrics.series import BACKEND, Group, Kind, Series, closed
from kvtiers.types import FailReason, StorageOp, UnfulfilledReason

SERIES: tuple[Series, ...] = (
    Series(
        "prefetched_tokens_total",
        Kind.COUNTER,
        Group.STORAGE,
        "tokens",
        "Copied from storage to host for waiting requests, at the acknowledgement.",
        identities=("copies_prefetch", "host_residency"),
    ),
    Series(
        "backuped_tokens_total",
        Kind.COUNTER,
        Group.STORAGE,
        "tokens",
        "Copied from host to storage, at the acknowledgement (the name is the field's; device to "
        "host is hicache_backup_tokens_total).",
        identities=("copies_store", "storage_put"),
    ),
    Series(
        "storage_prefetch_hit_tokens_total",
        Kind.COUNTER,
        Group.STORAGE,
        "tokens",
        "Storage said that it holds them for a waiting request, past its local match.",
        identities=("storage_found",),
    ),
    Series(
        "storage_prefetch_unfulfilled_tokens_total",
        Kind.COUNTER,
        Group.STORAGE,
        "tokens",
        "Found in storage for a request and not used by it, when that was decided.",
        (closed("reason", UnfulfilledReason),),
        identities=("storage_found",),
    ),
    Series(
        "prefetch_pgs",
        Kind.HISTOGRAM,
        Group.STORAGE,
        "pages",
        "Pages that one read call to a store delivered; calls that delivered none have no sample.",
        buckets=PAGES_PER_CALL,
    ),
    Series(
        "backup_pgs",
        Kind.HISTOGRAM,
        Group.STORAGE,
        "pages",
        "Pages that one write call to a store took; calls that took none have no sample.",
        buckets=PAGES_PER_CALL,
    ),
    Series(
        "prefetch_bandwidth",
        Kind.HISTOGRAM,
        Group.STORAGE,
        "GB/s",
        "Bytes delivered by one read call to a store / its duration, in 1e9 bytes per second.",
        buckets=GIGABYTES_PER_SECOND,
    ),
    Series(
        "backup_bandwidth",
        Kind.HISTOGRAM,
        Group.STORAGE,
        "GB/s",
        "Bytes taken by one write call to a store / its duration, in 1e9 bytes per second.",
        buckets=GIGABYTES_PER_SECOND,
    ),
    Series(
        "storage_errors_total",
        Kind.COUNTER,
        Group.STORAGE,
        "calls",
        "Calls to a store in which at least one page failed, by the kind of the first failure.",
        (BACKEND, closed("op", StorageOp), closed("kind", FailReason)),
    ),
    Series(
        "storage_op_duration_seconds",
        Kind.HISTOGRAM,
        Group.STORAGE,
        "seconds",
        "Duration of one call to a store, measured by the framework around it, at its end.",
        (BACKEND, closed("op", StorageOp)),
        buckets=STORAGE_SECONDS,
    ),
    Series(
        "storage_integrity_failures_total",
        Kind.COUNTER,
        Group.STORAGE,
        "calls",
        "Calls to a store that met a page whose header, identity or checksum did not match; the "
        "page was not used.",
        (BACKEND,),
    ),
    Series(
        "storage_used_bytes",
        Kind.GAUGE,
        Group.STORAGE,
        "bytes",
        "What the store holds, all overhead included; 0 without a store.",
    ),
    Series(
        "storage_quota_bytes",
        Kind.GAUGE,
        Group.STORAGE,
        "bytes",
        "How much the store may hold; 0 without a store, or without a limit.",
    ),
)
