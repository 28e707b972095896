"""Hits, copies and losses: what the field knows under these names."""

from __future__ import annotations

from kvtiers.metrics.histogram import COPY_SECONDS
from kvtiers.metrics.series import HIT_MODES, POOL, Group, Kind, Series, closed
from kvtiers.types import LOSS_REASONS

SERIES: tuple[Series, ...] = (
    Series(
        "prefill_effective_tokens_total",
        Kind.COUNTER,
        Group.MISSION,
        "tokens",
        "Prompt tokens of first admissions: input = really computed, with each chunk's result; "
        "device_hit, host_hit, storage_hit = found in that tier, once per request with its first "
        "chunk's result and only when their load was acknowledged. A retracted request's second "
        "prefill, a further sequence of one request, a voided attempt and a refused request count "
        "nothing. Effective hit rate = hits / (hits + input), as increases over one window.",
        (closed("mode", HIT_MODES),),
        identities=("prompt_first", "missed_first", "attempts_first"),
    ),
    Series(
        "hicache_backup_tokens_total",
        Kind.COUNTER,
        Group.MISSION,
        "tokens",
        "Copied from device to host, at the acknowledgement; pools with own slots only.",
        (POOL,),
        identities=("copies_backup", "host_residency"),
    ),
    Series(
        "hicache_backup_bytes_total",
        Kind.COUNTER,
        Group.MISSION,
        "bytes",
        "Copied from device to host by this rank, at the acknowledgement; all pools, followers "
        "included. Bandwidth = rate of this / rate of hicache_backup_duration_seconds_sum.",
        identities=("copies_backup",),
    ),
    Series(
        "hicache_backup_duration_seconds",
        Kind.HISTOGRAM,
        Group.MISSION,
        "seconds",
        "Time of the copy alone of one merged device-to-host operation, at its end. No sample "
        "where the device cannot time.",
        buckets=COPY_SECONDS,
    ),
    Series(
        "load_back_tokens_total",
        Kind.COUNTER,
        Group.MISSION,
        "tokens",
        "Copied from host to device, at the acknowledgement; pools with own slots only.",
        (POOL,),
        identities=("copies_load_back", "device_residency"),
    ),
    Series(
        "load_back_bytes_total",
        Kind.COUNTER,
        Group.MISSION,
        "bytes",
        "Copied from host to device by this rank, at the acknowledgement; all pools, followers "
        "included.",
        identities=("copies_load_back",),
    ),
    Series(
        "load_back_duration_seconds",
        Kind.HISTOGRAM,
        Group.MISSION,
        "seconds",
        "Time of the copy alone of one merged host-to-device operation, at its end. No sample "
        "where the device cannot time.",
        buckets=COPY_SECONDS,
    ),
    Series(
        "hicache_dropped_tokens_total",
        Kind.COUNTER,
        Group.MISSION,
        "tokens",
        "Lost: device tokens destroyed while no lower tier had a copy, and the host-only "
        "descendants destroyed because of that, when they left. Ordinary capacity eviction from "
        "host is not here (see tier_evicted_tokens_total), so an alert on this series means loss.",
        (closed("reason", LOSS_REASONS), POOL),
        identities=("device_residency", "host_residency"),
    ),
    Series(
        "evicted_tokens_total",
        Kind.COUNTER,
        Group.MISSION,
        "tokens",
        "Left the device tier by eviction (demoted, covered or dropped), when the slot became "
        "free; anchor pool only. Duplicates and pages removed by command are not evictions.",
        identities=("device_residency",),
    ),
    Series(
        "eviction_duration_seconds",
        Kind.HISTOGRAM,
        Group.MISSION,
        "seconds",
        "From the first moment an admission was blocked on eviction until its slots were granted, "
        "or of the call itself. No sample when nothing was freed.",
        buckets=COPY_SECONDS,
    ),
)
