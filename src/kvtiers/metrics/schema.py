"""The catalogue: every series that kvtiers exports, as data.

Owns names, types, units, labels with their closed values, and the words that explain them. Knows
neither how a value is found (`readout`) nor how it is written out (`prometheus`). A series stands
here when facts count it or a live part is asked for it, and not before: nothing in this list
stays 0 because nobody feeds it.

Names are without prefix. Counters end in `_total`; units are in the names where the field has not
fixed them otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvtiers.metrics.books import STAGES
from kvtiers.metrics.gauges import RecordOutcome, WhatIfSize
from kvtiers.metrics.histogram import (
    COPY_SECONDS,
    GIGABYTES_PER_SECOND,
    PAGES_PER_CALL,
    REQUEST_SECONDS,
    STAGE_SECONDS,
    STORAGE_SECONDS,
    TOKEN_SECONDS,
)
from kvtiers.metrics.identities import IDENTITY_NAMES
from kvtiers.metrics.savings import PASS_TOKENS_MIN
from kvtiers.types import (
    LOSS_REASONS,
    Attempt,
    BlockedOn,
    DeclineReason,
    FailReason,
    LeaveOutcome,
    LeaveReason,
    MissReason,
    Purpose,
    RequestOutcome,
    StorageOp,
    Tier,
    UnfulfilledReason,
)

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


def _closed(name: str, values: Iterable[str]) -> Label:
    return Label(name, tuple(str(value) for value in values))


SLOT_TIERS = (Tier.DEVICE, Tier.HOST)
HIT_MODES = ("input", "device_hit", "host_hit", "storage_hit")
SLOT_VIEWS = ("free", "reserved", "private", "leased", "evictable", "quarantined")
ATTEMPT_ENDS = ("planned", "booked", "voided", "aborted")

_POOL = _closed("pool", (ANCHOR,))
_TIER = _closed("tier", SLOT_TIERS)
_PURPOSE = _closed("purpose", Purpose)
_BACKEND = Label("backend", open_set="names of the stores attached since the start")

_ATTEMPTS = tuple(f"attempts_{attempt}" for attempt in Attempt)
_COPIES = tuple(f"copies_{purpose}" for purpose in Purpose)

_MISSION = (
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
        (_closed("mode", HIT_MODES),),
        identities=("prompt_first", "missed_first", "attempts_first"),
    ),
    Series(
        "hicache_backup_tokens_total",
        Kind.COUNTER,
        Group.MISSION,
        "tokens",
        "Copied from device to host, at the acknowledgement; pools with own slots only.",
        (_POOL,),
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
        (_POOL,),
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
        (_closed("reason", LOSS_REASONS), _POOL),
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

_STORAGE = (
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
        (_closed("reason", UnfulfilledReason),),
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
        (_BACKEND, _closed("op", StorageOp), _closed("kind", FailReason)),
    ),
    Series(
        "storage_op_duration_seconds",
        Kind.HISTOGRAM,
        Group.STORAGE,
        "seconds",
        "Duration of one call to a store, measured by the framework around it, at its end.",
        (_BACKEND, _closed("op", StorageOp)),
        buckets=STORAGE_SECONDS,
    ),
    Series(
        "storage_integrity_failures_total",
        Kind.COUNTER,
        Group.STORAGE,
        "calls",
        "Calls to a store that met a page whose header, identity or checksum did not match; the "
        "page was not used.",
        (_BACKEND,),
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

_OCCUPANCY = (
    Series(
        "tier_slots",
        Kind.GAUGE,
        Group.OCCUPANCY,
        "slots",
        "Slots by what they are doing. The states sum to the capacity. Leased and evictable are "
        "the two parts of resident.",
        (_TIER, _POOL, _closed("state", SLOT_VIEWS)),
        identities=("device_slots", "host_slots", "device_overdrawn", "host_overdrawn", "recount"),
    ),
    Series(
        "host_mirror_tokens",
        Kind.GAUGE,
        Group.OCCUPANCY,
        "tokens",
        "Resident on host and on device both.",
        (_POOL,),
    ),
    Series(
        "hicache_host_used_tokens",
        Kind.GAUGE,
        Group.OCCUPANCY,
        "tokens",
        "Host slots that are not free, anchor pool.",
        identities=("host_slots",),
    ),
    Series(
        "hicache_host_total_tokens",
        Kind.GAUGE,
        Group.OCCUPANCY,
        "tokens",
        "Capacity of the host tier, anchor pool; 0 without a host tier. 100 % can be reached.",
    ),
    Series(
        "num_used_tokens",
        Kind.GAUGE,
        Group.OCCUPANCY,
        "tokens",
        "Device slots that are neither free nor evictable, anchor pool: what requests hold now.",
        identities=("device_slots",),
    ),
    Series(
        "token_usage",
        Kind.GAUGE,
        Group.OCCUPANCY,
        "ratio",
        "num_used_tokens / capacity of the device tier.",
    ),
    Series(
        "page_size",
        Kind.GAUGE,
        Group.OCCUPANCY,
        "tokens",
        "Tokens per page: the unit of residency, copy and eviction.",
    ),
    Series(
        "ghost_pages",
        Kind.GAUGE,
        Group.OCCUPANCY,
        "pages",
        "Pages remembered after they left their last tier.",
    ),
    Series(
        "ghost_capacity_pages",
        Kind.GAUGE,
        Group.OCCUPANCY,
        "pages",
        "How many such pages can be remembered.",
    ),
    Series(
        "pinned_tokens",
        Kind.GAUGE,
        Group.OCCUPANCY,
        "tokens",
        "Tokens kept by pins; a token kept by two pins counts twice.",
        identities=("contradictions",),
    ),
    Series(
        "num_running_reqs",
        Kind.GAUGE,
        Group.OCCUPANCY,
        "requests",
        "Requests that hold a lease and compute.",
    ),
    Series(
        "num_queue_reqs",
        Kind.GAUGE,
        Group.OCCUPANCY,
        "requests",
        "Requests that wait for admission.",
    ),
    Series(
        "namespace_tokens",
        Kind.GAUGE,
        Group.OCCUPANCY,
        "tokens",
        "Resident tokens of the largest namespaces, the rest as `other`; large trees are counted "
        "over several seconds. The namespace is an alias, never a salt or a key, and another one "
        "after a restart.",
        (Label("namespace", open_set="aliases of the 10 largest, and other"), _TIER),
    ),
)

_INSIGHT = (
    Series(
        "ledger_imbalance",
        Kind.GAUGE,
        Group.INSIGHT,
        "as its terms",
        "Left minus right side of an identity of the books, at this scrape; 0, always. Anything "
        "else is a bug in kvtiers.",
        (_closed("identity", IDENTITY_NAMES),),
        identities=IDENTITY_NAMES,
    ),
    Series(
        "ledger_audits_total",
        Kind.COUNTER,
        Group.INSIGHT,
        "recounts",
        "Times the slot states were compared with a full recount of the cache's structure.",
        identities=("recount",),
    ),
    Series(
        "tier_evicted_tokens_total",
        Kind.COUNTER,
        Group.INSIGHT,
        "tokens",
        "Copies that left a tier, when the slot became free: demoted (a lower copy remains), "
        "covered (a higher one remains), duplicate (another copy was published first), removed "
        "(by command), dropped (it was the last).",
        (_TIER, _POOL, _closed("outcome", LeaveOutcome), _closed("reason", LeaveReason)),
        identities=("device_residency", "host_residency"),
    ),
    Series(
        "regret_tokens_total",
        Kind.COUNTER,
        Group.INSIGHT,
        "tokens",
        "Asked for again after they had left their last tier, by that tier and why they left it; "
        "when the request that asks is admitted.",
        (_TIER, _closed("reason", LeaveReason)),
    ),
    Series(
        "what_if_hit_ratio",
        Kind.GAUGE,
        Group.INSIGHT,
        "ratio",
        "Share of prompt tokens that would be found in this tier or above it, were it so many "
        "times as large as it is; from imagined caches over about the last thousand requests. "
        "Beside `x1` stands what bigger memory buys; 0 for a tier there is none of.",
        (_closed("tier", Tier), _closed("capacity", WhatIfSize)),
    ),
    Series(
        "prefill_missed_tokens_total",
        Kind.COUNTER,
        Group.INSIGHT,
        "tokens",
        "Prompt tokens of first admissions that had to be computed, by reason, with the first "
        "chunk's result. For requests that ran to their end the reasons sum to input.",
        (_closed("reason", MissReason),),
        identities=("missed_first", "prompt_first"),
    ),
    Series(
        "admission_attempts_total",
        Kind.COUNTER,
        Group.INSIGHT,
        "attempts",
        "Granted admission attempts (planned), and how they went on: booked with the first "
        "chunk's result, voided because a load failed, aborted before they were booked.",
        (_closed("attempt", Attempt), _closed("end", ATTEMPT_ENDS)),
        identities=_ATTEMPTS,
    ),
    Series(
        "admission_blocked_total",
        Kind.COUNTER,
        Group.INSIGHT,
        "attempts",
        "Attempts that got nothing and hold nothing, by what they wait for.",
        (_closed("on", BlockedOn),),
    ),
    Series(
        "load_back_joined_tokens_total",
        Kind.COUNTER,
        Group.INSIGHT,
        "tokens",
        "Host hits for which another request's load-back was already under way and was joined, "
        "at admission; nothing is copied for them.",
    ),
    Series(
        "copies_declined_tokens_total",
        Kind.COUNTER,
        Group.INSIGHT,
        "tokens",
        "Copies that could have been made and were not ordered, by reason, at the decision. The "
        "same tokens can be declined again later.",
        (_PURPOSE, _closed("reason", DeclineReason)),
        identities=("storage_put",),
    ),
    Series(
        "copies_failed_tokens_total",
        Kind.COUNTER,
        Group.INSIGHT,
        "tokens",
        "Copies that were ordered and did not succeed, by reason, at the acknowledgement.",
        (_PURPOSE, _closed("reason", FailReason)),
        identities=_COPIES,
    ),
    Series(
        "transfers_in_flight",
        Kind.GAUGE,
        Group.INSIGHT,
        "copies",
        "Copies that were ordered and are not acknowledged.",
        (_PURPOSE,),
        identities=_COPIES,
    ),
    Series(
        "oldest_transfer_age_seconds",
        Kind.GAUGE,
        Group.INSIGHT,
        "seconds",
        "Age of the oldest copy in flight; 0 when there is none.",
        (_PURPOSE,),
    ),
    Series(
        "transfer_stage_seconds",
        Kind.HISTOGRAM,
        Group.INSIGHT,
        "seconds",
        "Where a merged copy spends its time: queued until it begins, the copy alone, and from "
        "its end until it is applied; at the acknowledgement.",
        (_PURPOSE, _closed("stage", STAGES)),
        buckets=STAGE_SECONDS,
    ),
    Series(
        "backup_reused_tokens_total",
        Kind.COUNTER,
        Group.INSIGHT,
        "tokens",
        "Copied to host by a backup and loaded back for the first time since, at the "
        "acknowledgement of the load. Over hicache_backup_tokens_total: the share of backups that "
        "were of use on host (they may be of use in storage besides).",
        (_POOL,),
    ),
    Series(
        "forward_stall_seconds_total",
        Kind.COUNTER,
        Group.INSIGHT,
        "seconds",
        "Compute waited this long for layers that were still being loaded, after each pass.",
    ),
    Series(
        "prefill_seconds_saved_total",
        Kind.COUNTER,
        Group.INSIGHT,
        "seconds",
        "At least so much computing was spared by hits of first admissions, by the tier that held "
        "the tokens, with the booking: hit tokens at the best prefill speed measured so far, less "
        "the measured copy time. Hits wait for the first measurement (a pass of at least "
        f"{PASS_TOKENS_MIN} prompt tokens, a timed copy), so this is 0 until then.",
        (_closed("tier", Tier),),
    ),
    Series(
        "link_ceiling_bytes_per_second",
        Kind.GAUGE,
        Group.INSIGHT,
        "bytes per second",
        "What a link can carry, probed at start. Compare with the rates of the bytes and of the "
        "duration sums.",
        (Label("path", open_set="links the transfer has probed, as device_to_host"),),
    ),
)

_REQUESTS = (
    Series(
        "time_to_first_token_seconds",
        Kind.HISTOGRAM,
        Group.REQUESTS,
        "seconds",
        "From a request's arrival until its first token.",
        buckets=REQUEST_SECONDS,
    ),
    Series(
        "inter_token_latency_seconds",
        Kind.HISTOGRAM,
        Group.REQUESTS,
        "seconds",
        "From a sequence's previous token to its next, one sample per token after the first.",
        buckets=TOKEN_SECONDS,
    ),
    Series(
        "e2e_request_latency_seconds",
        Kind.HISTOGRAM,
        Group.REQUESTS,
        "seconds",
        "From a request's arrival until it left.",
        buckets=REQUEST_SECONDS,
    ),
    Series(
        "prompt_tokens_total",
        Kind.COUNTER,
        Group.REQUESTS,
        "tokens",
        "Prompts of requests, when they leave.",
        identities=("request_prompts",),
    ),
    Series(
        "generation_tokens_total",
        Kind.COUNTER,
        Group.REQUESTS,
        "tokens",
        "Output of requests, when they leave.",
    ),
    Series(
        "cached_tokens_total",
        Kind.COUNTER,
        Group.REQUESTS,
        "tokens",
        "Prompt tokens of requests that were not computed, by the tier that held them, when the "
        "request leaves; the same numbers as its usage reports. Of n answers to one prompt each "
        "counts as a request of its own here, in prompt_tokens_total and in requests_total, as the "
        "field counts them; prefill_effective_tokens_total counts the prompt once.",
        (_closed("cache_source", Tier),),
        identities=("request_prompts",),
    ),
    Series(
        "requests_total",
        Kind.COUNTER,
        Group.REQUESTS,
        "requests",
        "Requests that left, by how.",
        (_closed("outcome", RequestOutcome),),
    ),
    Series(
        "requests_too_large_total",
        Kind.COUNTER,
        Group.REQUESTS,
        "requests",
        "Admissions refused at once because the request can never fit into the device tier.",
    ),
    Series(
        "recorded_requests_total",
        Kind.COUNTER,
        Group.REQUESTS,
        "requests",
        "Requests for the trace of `serve --record`, by what became of them; all 0 where nothing "
        "is recorded. `left_out` had no answer; `lost` came although the file could no longer be "
        "written, or were under way then.",
        (_closed("outcome", RecordOutcome),),
    ),
    Series(
        "num_retracted_requests_total",
        Kind.COUNTER,
        Group.REQUESTS,
        "requests",
        "Decoding requests that gave their slots back and went to the queue again.",
    ),
    Series(
        "num_retracted_tokens_total",
        Kind.COUNTER,
        Group.REQUESTS,
        "tokens",
        "Tokens whose KV those requests held when they were retracted.",
    ),
)

CATALOGUE: tuple[Series, ...] = (*_MISSION, *_STORAGE, *_OCCUPANCY, *_INSIGHT, *_REQUESTS)
"""Every series, in the order of the documentation and the exposition."""

BY_NAME = {series.name: series for series in CATALOGUE}
