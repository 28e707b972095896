"""Why, where and what for: what nobody else exports."""

from __future__ import annotations

from kvtiers.metrics.books import STAGES
from kvtiers.metrics.gauges import WhatIfSize
from kvtiers.metrics.histogram import STAGE_SECONDS
from kvtiers.metrics.identities import IDENTITY_NAMES
from kvtiers.metrics.savings import PASS_TOKENS_MIN
from kvtiers.metrics.series import (
    ATTEMPT_ENDS,
    ATTEMPTS,
    COPIES,
    POOL,
    PURPOSE,
    TIER,
    Group,
    Kind,
    Label,
    Series,
    closed,
)
from kvtiers.types import (
    Attempt,
    BlockedOn,
    DeclineReason,
    FailReason,
    LeaveOutcome,
    LeaveReason,
    MissReason,
    Tier,
)

SERIES: tuple[Series, ...] = (
    Series(
        "ledger_imbalance",
        Kind.GAUGE,
        Group.INSIGHT,
        "as its terms",
        "Left minus right side of an identity of the books, at this scrape; 0, always. Anything "
        "else is a bug in kvtiers.",
        (closed("identity", IDENTITY_NAMES),),
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
        (TIER, POOL, closed("outcome", LeaveOutcome), closed("reason", LeaveReason)),
        identities=("device_residency", "host_residency"),
    ),
    Series(
        "regret_tokens_total",
        Kind.COUNTER,
        Group.INSIGHT,
        "tokens",
        "Asked for again after they had left their last tier, by that tier and why they left it; "
        "when the request that asks is admitted.",
        (TIER, closed("reason", LeaveReason)),
    ),
    Series(
        "what_if_hit_ratio",
        Kind.GAUGE,
        Group.INSIGHT,
        "ratio",
        "Share of prompt tokens that would be found in this tier or above it, were it so many "
        "times as large as it is; from imagined caches over about the last thousand requests. "
        "Beside `x1` stands what bigger memory buys; 0 for a tier there is none of.",
        (closed("tier", Tier), closed("capacity", WhatIfSize)),
    ),
    Series(
        "prefill_missed_tokens_total",
        Kind.COUNTER,
        Group.INSIGHT,
        "tokens",
        "Prompt tokens of first admissions that had to be computed, by reason, with the first "
        "chunk's result. For requests that ran to their end the reasons sum to input.",
        (closed("reason", MissReason),),
        identities=("missed_first", "prompt_first"),
    ),
    Series(
        "admission_attempts_total",
        Kind.COUNTER,
        Group.INSIGHT,
        "attempts",
        "Granted admission attempts (planned), and how they went on: booked with the first "
        "chunk's result, voided because a load failed, aborted before they were booked.",
        (closed("attempt", Attempt), closed("end", ATTEMPT_ENDS)),
        identities=ATTEMPTS,
    ),
    Series(
        "admission_blocked_total",
        Kind.COUNTER,
        Group.INSIGHT,
        "attempts",
        "Attempts that got nothing and hold nothing, by what they wait for.",
        (closed("on", BlockedOn),),
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
        (PURPOSE, closed("reason", DeclineReason)),
        identities=("storage_put",),
    ),
    Series(
        "copies_failed_tokens_total",
        Kind.COUNTER,
        Group.INSIGHT,
        "tokens",
        "Copies that were ordered and did not succeed, by reason, at the acknowledgement.",
        (PURPOSE, closed("reason", FailReason)),
        identities=COPIES,
    ),
    Series(
        "transfers_in_flight",
        Kind.GAUGE,
        Group.INSIGHT,
        "copies",
        "Copies that were ordered and are not acknowledged.",
        (PURPOSE,),
        identities=COPIES,
    ),
    Series(
        "oldest_transfer_age_seconds",
        Kind.GAUGE,
        Group.INSIGHT,
        "seconds",
        "Age of the oldest copy in flight; 0 when there is none.",
        (PURPOSE,),
    ),
    Series(
        "transfer_stage_seconds",
        Kind.HISTOGRAM,
        Group.INSIGHT,
        "seconds",
        "Where a merged copy spends its time: queued until it begins, the copy alone, and from "
        "its end until it is applied; at the acknowledgement.",
        (PURPOSE, closed("stage", STAGES)),
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
        (POOL,),
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
        (closed("tier", Tier),),
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
