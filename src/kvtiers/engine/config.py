"""Everything an operator may set about an engine, checked at once.

Owns the translation from what people say (GiB per tier, a directory, a policy) to what the parts
need; it knows no torch. The size of a page in bytes comes from the model, so tiers given in GiB
become pages in `tier_pages`. What is wrong is told in words of the command line, where most
configurations come from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvtiers.core.policies import FRONTIERS
from kvtiers.errors import ConfigError
from kvtiers.scheduling.policies import POLICY_NAMES
from kvtiers.types import PrefetchPolicy, Retention, StoreOn, WritePolicy

GIB = 1 << 30
_CHOICES: dict[str, type[StrEnum]] = {
    "write_policy": WritePolicy,
    "retention": Retention,
    "store_on": StoreOn,
    "prefetch_policy": PrefetchPolicy,
}
DTYPES = ("float32", "bfloat16", "float16")
_NAMES: dict[str, tuple[str, ...]] = {
    "dtype": DTYPES,
    "eviction": tuple(FRONTIERS),
    "schedule_policy": POLICY_NAMES,
}
_STORAGE_NEEDS_HOST = "what goes to and from --storage passes through the host tier"
NUM_THREADS_MAX = 512
"""Far more than help; where the machine has no room for so many, torch ends the process."""
_LEAST = {
    "num_threads": 1,
    "page_tokens": 1,
    "device_pages": 1,
    "host_pages": 0,
    "prefetch_threshold_tokens": 0,
    "load_back_threshold_tokens": 0,
    "max_running_requests": 1,
    "max_waiting_requests": 1,
    "max_batch_tokens": 1,
    "context_tokens": 2,  # one of a prompt, one of its answer
    "capture_logits_mib": 0,
}
"""The least that a size may be, where it is given."""


def flag_of(name: str) -> str:
    """The option of `kvtiers serve` that sets a member of this name."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine: its model, its three tiers and its limits.

    Device and host are sized by `*_pages` where given, else by `*_gib`. `storage_dir` None means
    no storage tier; `storage_gib` 0 means no quota. `context_tokens` None takes the model's own
    limit. `num_threads` is torch's: two threads beside a busy process are many times slower than
    one, so it is raised by hand only. `capture_logits_mib` bounds the debugging buffer of
    `GenerationRequest.capture_logits`; 0 refuses such requests.
    """

    model: str = "smollm2-135m-instruct"
    dtype: str = "float32"
    num_threads: int = 1
    models_dir: Path | None = None
    """Where converted models are kept; None: `models` in `$KVTIERS_CACHE` or `~/.cache/kvtiers`."""

    page_tokens: int = 16
    device_gib: float = 0.5
    device_pages: int | None = None
    host_gib: float = 1.0
    host_pages: int | None = None
    storage_dir: Path | None = None
    storage_gib: float = 0.0

    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    retention: Retention = Retention.INCLUSIVE
    store_on: StoreOn = StoreOn.BACKUP
    eviction: str = "lru"
    prefetch_policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    prefetch_threshold_tokens: int = 64
    load_back_threshold_tokens: int = 1

    schedule_policy: str = "fcfs"
    max_running_requests: int = 64
    max_waiting_requests: int = 1024
    max_batch_tokens: int = 1024
    """Positions computed in one step: the length of a prefill chunk and the sum over a batch."""
    context_tokens: int | None = None
    load_timeout_seconds: float = 30.0
    """How long a forward pass waits for a layer that is being loaded before it gives up."""
    audit_seconds: float = 5.0
    """How often the books are recounted in full while requests run."""
    capture_logits_mib: int = 0
    decision_log: Path | None = None
    """Where every call to the cache is recorded, for `kvtiers.testing.replay`; None: nowhere."""

    def __post_init__(self) -> None:
        problems: list[str] = []
        for name, kind in _CHOICES.items():
            # Policies may be given by name; the parts compare members, not strings.
            try:
                object.__setattr__(self, name, kind(getattr(self, name)))
            except ValueError:
                known = ", ".join(kind)
                problems.append(f"{flag_of(name)} is '{getattr(self, name)}'; known: {known}")
        for name, names in _NAMES.items():
            if getattr(self, name) not in names:
                known = ", ".join(names)
                problems.append(f"{flag_of(name)} is '{getattr(self, name)}'; known: {known}")
        if self.max_running_requests >= self.max_batch_tokens:
            problems.append(
                f"--max-running-requests is {self.max_running_requests} and --max-batch-tokens "
                f"{self.max_batch_tokens}; decoding alone would fill every step: raise "
                "--max-batch-tokens above --max-running-requests"
            )
        problems += self._problems_with_sizes() + self._problems_with_storage()
        if problems:
            raise ConfigError("; ".join(problems))

    def _problems_with_sizes(self) -> list[str]:
        problems = [
            f"{flag_of(name)} is {getattr(self, name)}; it must be at least {least}"
            for name, least in _LEAST.items()
            if getattr(self, name) is not None and getattr(self, name) < least
        ]
        if self.num_threads > NUM_THREADS_MAX:
            problems.append(
                f"--num-threads is {self.num_threads}; it must be at most {NUM_THREADS_MAX}, and "
                "more than there are cores make every step slower"
            )
        return problems + [
            f"{flag_of(name)} is {getattr(self, name)}; it must be a finite number, 0 or more"
            for name in ("device_gib", "host_gib", "storage_gib", "load_timeout_seconds")
            if not 0 <= getattr(self, name) < math.inf
        ]

    def _problems_with_storage(self) -> list[str]:
        if self.storage_dir is None:
            return (
                [f"--storage-gib {self.storage_gib:g} without --storage: say where with --storage"]
                if self.storage_gib > 0
                else []
            )
        flag, host = ("--host-gib", self.host_gib)
        if self.host_pages is not None:
            flag, host = ("--host-pages", self.host_pages)
        return (
            [f"{flag} is 0 and {_STORAGE_NEEDS_HOST}; raise {flag} or use no storage"]
            if host == 0
            else []
        )

    def tier_pages(self, page_bytes: int) -> tuple[int, int]:
        """Pages of the device and the host tier, for a model whose page takes `page_bytes`."""
        device = self.device_pages
        if device is None:
            device = int(self.device_gib * GIB) // page_bytes
        host = self.host_pages
        if host is None:
            host = int(self.host_gib * GIB) // page_bytes
        if device < 1:
            raise ConfigError(
                f"--device-gib {self.device_gib:g} holds no page: one page of {self.page_tokens} "
                f"tokens takes {page_bytes} bytes; raise --device-gib or lower --page-tokens"
            )
        if self.storage_dir is not None and host < 1:
            raise ConfigError(
                f"--host-gib {self.host_gib:g} holds no page of {page_bytes} bytes and "
                f"{_STORAGE_NEEDS_HOST}; raise --host-gib"
            )
        return device, host
