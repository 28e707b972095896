"""The vocabulary: tiers, pools, policies, outcomes, and the closed lists of reasons.

Everything here is data. A value that can end up as a metric label is a member of an enum in this
file, so that the catalogue can seed it with 0 and no label value is ever invented at run time.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtiers.errors import ConfigError, InvalidTokens, UnknownName

TOKEN_BYTES = 4
"""A token is one little-endian int32 everywhere, from the tokenizer to the storage key."""

NAMESPACES_SHOWN = 10
OTHER_NAMESPACES = "other"
"""Where namespaces are told apart, the largest are, and the rest is one."""

_ALIAS_KEY = secrets.token_bytes(16)

SlotArray: TypeAlias = npt.NDArray[np.int32]


class Tier(StrEnum):
    """Where a copy of a page lives, nearest first."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


class Purpose(StrEnum):
    """Why bytes move between two tiers."""

    BACKUP = "backup"  # device -> host
    LOAD_BACK = "load_back"  # host -> device
    PREFETCH = "prefetch"  # storage -> host, before admission
    STORE = "store"  # host -> storage

    @property
    def source(self) -> Tier:
        return _DIRECTION[self][0]

    @property
    def target(self) -> Tier:
        return _DIRECTION[self][1]


_DIRECTION = {
    Purpose.BACKUP: (Tier.DEVICE, Tier.HOST),
    Purpose.LOAD_BACK: (Tier.HOST, Tier.DEVICE),
    Purpose.PREFETCH: (Tier.STORAGE, Tier.HOST),
    Purpose.STORE: (Tier.HOST, Tier.STORAGE),
}


class SlotState(StrEnum):
    """What a slot of a device or host pool is doing; the states sum to the capacity, always."""

    FREE = "free"
    RESERVED = "reserved"  # a copy will fill it
    PRIVATE = "private"  # a running request's, not published
    RESIDENT = "resident"
    QUARANTINED = "quarantined"  # a copy that missed its deadline may still write it


class SlotUnit(StrEnum):
    """What one slot of a pool holds: a page of tokens, or one recurrent state."""

    TOKEN = "token"
    STATE = "state"


class WritePolicy(StrEnum):
    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


class Retention(StrEnum):
    """Which copies the host tier gives up first."""

    INCLUSIVE = "inclusive"  # one recency list; mirrors age with their device copy
    EXCLUSIVE = "exclusive"  # mirrors leave first, then sole copies (write_back only)


class StoreOn(StrEnum):
    """When a host page is stored."""

    BACKUP = "backup"
    EVICT = "evict"


class PrefetchPolicy(StrEnum):
    """How long an admission waits for the request's own prefetch."""

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"


class LeaveOutcome(StrEnum):
    """What a copy that leaves a tier leaves behind."""

    DEMOTED = "demoted"  # a lower copy remains
    COVERED = "covered"  # a higher copy remains
    DUPLICATE = "duplicate"  # commit found another copy in the same tier
    REMOVED = "removed"  # by command
    DROPPED = "dropped"  # it was the last


class LeaveReason(StrEnum):
    """Why a copy left. The first four are the reasons of `hicache_dropped_tokens_total`."""

    HOST_PRESSURE = "host_pressure"
    WRITE_THROUGH_UNBACKED_EVICTION = "write_through_unbacked_eviction"
    SELECTIVE_COLD = "selective_cold"
    COPY_FAILED = "copy_failed"
    CAPACITY = "capacity"
    COMMAND = "command"
    DUPLICATE = "duplicate"


LOSS_REASONS = (
    LeaveReason.HOST_PRESSURE,
    LeaveReason.WRITE_THROUGH_UNBACKED_EVICTION,
    LeaveReason.SELECTIVE_COLD,
    LeaveReason.COPY_FAILED,
)
"""A page dropped from device for one of these is a loss; `CAPACITY` without a host tier is not."""


class MissReason(StrEnum):
    """Why a prompt token had to be computed; the reasons sum to `computed`."""

    UNKNOWN = "unknown"  # never seen, or forgotten by the ghosts
    EVICTED = "evicted"
    DROPPED = "dropped"
    STRANDED = "stranded"  # a component of the model was missing there
    LOAD_DECLINED = "load_declined"
    LOAD_FAILED = "load_failed"
    DEADLINE = "deadline"
    IN_FLIGHT = "in_flight"
    INTEGRITY = "integrity"
    SUB_PAGE_TAIL = "sub_page_tail"
    LAST_TOKEN = "last_token"


class UnfulfilledReason(StrEnum):
    """Why tokens that storage was found to hold were not used by the request that asked."""

    BELOW_THRESHOLD = "below_threshold"
    HOST_CAPACITY = "host_capacity"
    DEVICE_CAPACITY = "device_capacity"
    DEVICE_COVERED = "device_covered"
    STORAGE_TRANSFER = "storage_transfer"
    DEADLINE = "deadline"
    ANCHOR_LOST = "anchor_lost"
    DEVICE_OVERLAP = "device_overlap"
    CACHE_ADMISSION_SHORTFALL = "cache_admission_shortfall"
    INTEGRITY = "integrity"
    DROPPED = "dropped"


class DeclineReason(StrEnum):
    """Why a copy that could have been made was not ordered."""

    NO_HOST_TIER = "no_host_tier"
    NO_STORAGE = "no_storage"
    HOST_CAPACITY = "host_capacity"
    DEVICE_CAPACITY = "device_capacity"
    BELOW_THRESHOLD = "below_threshold"
    BREAK_EVEN = "break_even"
    IN_FLIGHT_BOUND = "in_flight_bound"
    ALREADY_IN_FLIGHT = "already_in_flight"
    PARENT_MISSING = "parent_missing"
    SELECTIVE_COLD = "selective_cold"
    NOTHING_FOUND = "nothing_found"


class FailReason(StrEnum):
    """Why (the rest of) a copy did not succeed."""

    TRANSFER = "transfer"  # the copy raised or reported an error
    STORAGE = "storage"  # the store raised or reported an error
    MISSING = "missing"  # storage no longer has the page
    INTEGRITY = "integrity"  # header, identity or checksum did not match
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    ORPHANED = "orphaned"  # the copy of its head failed
    QUOTA = "quota"  # storage is full
    SHUTDOWN = "shutdown"


class BlockedOn(StrEnum):
    """What an admission that holds nothing waits for."""

    DEVICE_CAPACITY = "device_capacity"  # running requests must end or grow smaller
    EVICTION = "eviction"  # copies that free slots are in flight
    LOADING = "loading"  # a page of its path is being loaded by a copy that failed above
    PREFETCH = "prefetch"  # its own prefetch, under its policy


class Attempt(StrEnum):
    """What kind of admission attempt a lease is; only `FIRST` is effective traffic."""

    FIRST = "first"
    REPLAY = "replay"  # a retracted request's second prefill
    FORK = "fork"  # a further sequence of one request (n > 1)


class EndedBy(StrEnum):
    """How a lease ended."""

    FINISHED = "finished"
    RETRACTED = "retracted"
    ABORTED = "aborted"
    VOIDED = "voided"  # a load it relied on failed after it was granted


class StorageOp(StrEnum):
    """A call to a store, as the framework around it times and counts it."""

    EXISTS = "exists"
    READ = "read"
    WRITE = "write"
    DELETE = "delete"
    CLEAR = "clear"


class RequestOutcome(StrEnum):
    """How a request left the server; every request leaves in exactly one of these ways."""

    STOP = "stop"  # end of sequence, a stop token id, or a stop string
    LENGTH = "length"  # `max_tokens` produced
    CANCELLED = "cancelled"  # by its client
    DEADLINE = "deadline"  # its time ran out; what it had produced is its answer
    REFUSED = "refused"  # it can never fit here
    FAILED = "failed"  # the forward pass failed, or its loads failed too often


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """One kind of memory.

    `bytes_per_slot` is the size of one page of tokens (unit token) or of one state (unit state),
    over all layers. A pool that `follows` another shares its slots: its bytes move with them, and
    it is left out of every token count.
    """

    name: str
    bytes_per_slot: int
    unit: SlotUnit = SlotUnit.TOKEN
    follows: str | None = None

    def __post_init__(self) -> None:
        if self.bytes_per_slot <= 0:
            raise ConfigError(
                f"pool '{self.name}' has {self.bytes_per_slot} bytes per slot; it must be positive"
            )


@dataclass(frozen=True, slots=True)
class Namespace:
    """The root that a page hangs from. Pages of two namespaces never match, in any tier.

    `model` is the model's fingerprint (tensors as loaded, configuration that shapes KV, dtype, KV
    layout version). Every part is length-prefixed in the digest, so ("a", "bc") is not ("ab", "c").
    """

    model: str
    lora: str = ""
    salt: str = ""
    extra: str = ""
    digest: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        state = hashlib.blake2b(b"kvtiers-namespace-1", digest_size=32)
        for part in (self.model, self.lora, self.salt, self.extra):
            raw = part.encode()
            state.update(len(raw).to_bytes(8, "little"))
            state.update(raw)
        object.__setattr__(self, "digest", state.digest())

    @property
    def alias(self) -> str:
        """A name for dashboards: tells namespaces apart, reveals neither salt nor key.

        Keyed by this process, because a salt may be easy to guess and a guess must not be
        verifiable; so it is another one after a restart.
        """
        return hashlib.blake2b(self.digest, key=_ALIAS_KEY, digest_size=8).hexdigest()


class Missed(NamedTuple):
    """`tokens` of a prompt that had to be computed, and why."""

    reason: MissReason
    tokens: int


class HitSplit(NamedTuple):
    """Where a prompt came from, in tokens; the four sum to the prompt.

    `missed` explains `computed`: its tokens sum to it.
    """

    device_hit: int
    host_hit: int
    storage_hit: int
    computed: int
    missed: tuple[Missed, ...] = ()

    @property
    def prompt(self) -> int:
        return self.device_hit + self.host_hit + self.storage_hit + self.computed


@dataclass(frozen=True, slots=True)
class CopyCosts:
    """Constants, fixed at start, that say when loading back is slower than computing again.

    All zero (the default) means copying is never slower.
    """

    copy_fixed_seconds: float = 0.0
    copy_seconds_per_page: float = 0.0
    compute_seconds_per_token: float = 0.0

    def copying_loses(self, pages: int, tokens: int) -> bool:
        copy_seconds = self.copy_fixed_seconds + pages * self.copy_seconds_per_page
        return copy_seconds > tokens * self.compute_seconds_per_token > 0


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Everything the core decides by. Sizes are in pages; `0` host pages means no host tier."""

    device_pages: int
    host_pages: int = 0
    page_tokens: int = 16
    pools: tuple[PoolSpec, ...] = (PoolSpec("kv", 1),)
    storage: bool = False
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    retention: Retention = Retention.INCLUSIVE
    store_on: StoreOn = StoreOn.BACKUP
    eviction: str = "lru"
    prefetch_policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    prefetch_threshold_tokens: int = 256
    prefetch_timeout_base_seconds: float = 1.0
    prefetch_timeout_seconds_per_1k_tokens: float = 0.25
    prefetch_batch_pages: int = 64
    prefetch_in_flight_share: float = 0.5
    load_back_threshold_tokens: int = 1
    copy_costs: CopyCosts = CopyCosts()
    backup_in_flight_pages: int = 1 << 30
    store_in_flight_pages: int = 4096
    cleaner_low: float = 0.1
    """write_back: start cleaning when free plus clean pages fall below this share of device."""
    cleaner_high: float = 0.2
    ghost_pages: int | None = None
    """Pages remembered after they left their last tier; None: as many as device and host hold."""
    last_token_rule: bool = True
    """At least one prompt token is always computed. Off only for logical replays."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("write_policy", WritePolicy),
            ("retention", Retention),
            ("store_on", StoreOn),
            ("prefetch_policy", PrefetchPolicy),
        ):
            object.__setattr__(self, name, _member(choices, name, getattr(self, name)))
        problems: list[str] = []
        if self.page_tokens < 1:
            problems.append(f"page_tokens is {self.page_tokens}; the smallest page is 1 token")
        if self.device_pages < 1:
            problems.append(f"device_pages is {self.device_pages}; the device needs at least 1")
        if self.host_pages < 0:
            problems.append(f"host_pages is {self.host_pages}; use 0 for no host tier")
        writes_back = self.write_policy is WritePolicy.WRITE_BACK
        if self.retention is Retention.EXCLUSIVE and not writes_back:
            problems.append(
                f"retention=exclusive with write_policy={self.write_policy} would throw away host "
                "copies just before the device drops the pages; use write_back or inclusive"
            )
        if not 0 <= self.cleaner_low <= self.cleaner_high <= 1:
            problems.append(
                f"cleaner watermarks are {self.cleaner_low} and {self.cleaner_high}; "
                "they need 0 <= low <= high <= 1"
            )
        if not 0 < self.prefetch_in_flight_share <= 1:
            problems.append(
                f"prefetch_in_flight_share is {self.prefetch_in_flight_share}; it is in (0, 1]"
            )
        if self.storage and not self.host_pages:
            problems.append("storage needs a host tier to pass through; set host_pages above 0")
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            problems.append(f"pool names repeat: {names}")
        anchors = [p.name for p in self.pools if p.follows is None]
        if anchors[:1] != ["kv"]:
            problems.append(f"the first pool with own slots must be 'kv'; got {anchors}")
        problems.extend(
            f"pool '{pool.name}' follows '{pool.follows}', which is not one of {anchors}"
            for pool in self.pools
            if pool.follows is not None and pool.follows not in anchors
        )
        if problems:
            raise ConfigError("; ".join(problems))


def _member(choices: type[StrEnum], field_name: str, value: str) -> StrEnum:
    """The member called `value`: policies may be given by name, and are compared by identity."""
    try:
        return choices(value)
    except ValueError:
        raise UnknownName(field_name.replace("_", " "), value, choices) from None


def token_key(tokens: npt.ArrayLike) -> bytes:
    """Tokens as the bytes that every key in this package is made of (little-endian int32).

    Raises `InvalidTokens` for anything that is not a flat sequence of integers in [0, 2**31).
    """
    array = np.asarray(tokens)
    if array.size == 0:
        return b""
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise InvalidTokens(
            f"tokens must be a flat sequence of integers; got dtype {array.dtype} "
            f"with shape {array.shape}"
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= 1 << 31:
        raise InvalidTokens(f"tokens lie in [0, 2**31); got values from {low} to {high}")
    return array.astype("<i4", copy=False).tobytes()
