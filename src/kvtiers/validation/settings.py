"""One configuration for both sides: as arguments of the server, and as that of a replay.

Owns the translation and the defaults. The defaults make every tier matter: the device holds a
third, device and host together less than all of what the workload's conversations have in KV, and
not all clients fit on the device at once.

Invariant, kept by a test: `replay_config` has the cache and the scheduler that the engine builds
from the same settings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtiers.errors import ConfigError
from kvtiers.planner.machines import Machine
from kvtiers.planner.replay import ReplayConfig
from kvtiers.scheduling.config import SchedulerConfig
from kvtiers.types import CacheConfig, PoolSpec, PrefetchPolicy, Retention, StoreOn, WritePolicy

PREFETCH_THRESHOLD_TOKENS = 64
LOAD_BACK_THRESHOLD_TOKENS = 1
DECODE_STEPS_AT_ONCE = 64
"""Decode steps that a replay may do in one run, as long as nothing else happens."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The tiers, policies and limits of a validation. Sizes in pages; storage has no quota."""

    model: str = "smollm2-135m-instruct"
    page_tokens: int = 16
    device_pages: int = 224
    host_pages: int = 288
    storage: bool = True
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    retention: Retention = Retention.INCLUSIVE
    store_on: StoreOn = StoreOn.BACKUP
    prefetch_policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    schedule_policy: str = "fcfs"
    max_running_requests: int = 64
    max_batch_tokens: int = 1024
    context_tokens: int = 2048

    def server_arguments(self, storage_directory: Path) -> list[str]:
        """Arguments of `kvtiers serve` for these settings."""
        storage = ["--storage", str(storage_directory)] if self.storage else []
        return [
            self.model,
            *("--dtype", "float32", "--page-tokens", str(self.page_tokens)),
            *("--device-pages", str(self.device_pages), "--host-pages", str(self.host_pages)),
            *storage,
            *("--write-policy", str(self.write_policy), "--retention", str(self.retention)),
            *("--store-on", str(self.store_on), "--prefetch-policy", str(self.prefetch_policy)),
            *("--prefetch-threshold-tokens", str(PREFETCH_THRESHOLD_TOKENS)),
            *("--load-back-threshold-tokens", str(LOAD_BACK_THRESHOLD_TOKENS)),
            *("--schedule-policy", self.schedule_policy),
            *("--max-running-requests", str(self.max_running_requests)),
            *("--max-batch-tokens", str(self.max_batch_tokens)),
            *("--context-tokens", str(self.context_tokens)),
        ]

    def replay_config(self, kv_bytes_per_token: int, machine: Machine) -> ReplayConfig:
        """The same tiers, policies and limits for a replay on a calibrated machine."""
        pool = PoolSpec("kv", kv_bytes_per_token * self.page_tokens)
        return ReplayConfig(
            cache=CacheConfig(
                device_pages=self.device_pages,
                host_pages=self.host_pages,
                page_tokens=self.page_tokens,
                pools=(pool,),
                storage=self.storage,
                write_policy=self.write_policy,
                retention=self.retention,
                store_on=self.store_on,
                prefetch_policy=self.prefetch_policy,
                prefetch_threshold_tokens=PREFETCH_THRESHOLD_TOKENS,
                load_back_threshold_tokens=LOAD_BACK_THRESHOLD_TOKENS,
            ),
            machine=machine,
            scheduler=SchedulerConfig(
                policy=self.schedule_policy,
                max_running=self.max_running_requests,
                max_step_tokens=self.max_batch_tokens,
                max_prefill_tokens=self.max_batch_tokens,
                repeat_max=DECODE_STEPS_AT_ONCE,
            ),
            storage_pages=math.inf,
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {name: str(v) if isinstance(v, str) else v for name, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Settings:
        """From what `to_dict` gave; raises `ConfigError`."""
        try:
            return cls(
                **{
                    **content,
                    "write_policy": WritePolicy(content["write_policy"]),
                    "retention": Retention(content["retention"]),
                    "store_on": StoreOn(content["store_on"]),
                    "prefetch_policy": PrefetchPolicy(content["prefetch_policy"]),
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"these are no settings of a validation: {error!r}") from error
