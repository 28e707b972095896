"""Occupancy: who has the slots, and what is remembered of pages that are gone."""

from __future__ import annotations

from kvtiers.metrics.series import POOL, SLOT_VIEWS, TIER, Group, Kind, Label, Series, closed

SERIES: tuple[Series, ...] = (
    Series(
        "tier_slots",
        Kind.GAUGE,
        Group.OCCUPANCY,
        "slots",
        "Slots by what they are doing. The states sum to the capacity. Leased and evictable are "
        "the two parts of resident.",
        (TIER, POOL, closed("state", SLOT_VIEWS)),
        identities=("device_slots", "host_slots", "device_overdrawn", "host_overdrawn", "recount"),
    ),
    Series(
        "host_mirror_tokens",
        Kind.GAUGE,
        Group.OCCUPANCY,
        "tokens",
        "Resident on host and on device both.",
        (POOL,),
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
        (Label("namespace", open_set="aliases of the 10 largest, and other"), TIER),
    ),
)
