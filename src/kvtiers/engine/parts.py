"""The parts of a running engine, wired together from one configuration.

Owns the wiring: which part is given which, and the order in which they are opened and closed.
Everything in here is touched by the engine's thread alone once it runs; other threads come in
through `LLMEngine.call_in_loop`. Must not know requests or clients.

    scheduler ──> cache ──orders──> controller ──> transfer  (device <-> host)
        │           │                   │      └─> storage   (host <-> storage)
        │           └──facts──┐         │
        └──batches──> executor └──> ledger <──facts
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from kvtiers.core.cache import UnifiedRadixCache
from kvtiers.core.census import Census
from kvtiers.core.interface import PrefixCache
from kvtiers.engine.capture import LogitsCapture
from kvtiers.engine.config import GIB, EngineConfig
from kvtiers.engine.executor import TorchExecutor
from kvtiers.engine.pools import KvPools
from kvtiers.engine.served_model import ServedModel
from kvtiers.engine.store_closing import close_apart, wait_closed
from kvtiers.engine.what_if import WhatIf
from kvtiers.errors import ConfigError, StorageError
from kvtiers.metrics.gauges import Gauges
from kvtiers.metrics.ledger import Ledger
from kvtiers.runtime.controller import CacheController
from kvtiers.runtime.decision_log import RecordedCache
from kvtiers.runtime.flights import Deadlines
from kvtiers.runtime.storage_worker import StorageWorker
from kvtiers.scheduling.config import SchedulerConfig
from kvtiers.scheduling.scheduler import Scheduler
from kvtiers.storage.file import FileStore
from kvtiers.storage.port import PageStore, StoreStats
from kvtiers.transfer.cpu import CpuTransfer
from kvtiers.transfer.host_memory import check_fits
from kvtiers.transfer.port import Transfer
from kvtiers.types import CacheConfig, StoreOn, Tier, WritePolicy

log = logging.getLogger(__name__)

BACKEND = "file"
"""Name of the store in `storage_errors_total{backend}` and the like."""

DETACH_SECONDS = 1.0
"""How long the engine stands still, when storage is detached, for the calls that are in the store.
What takes longer is seen to later."""

StoreFactory: TypeAlias = Callable[[EngineConfig, KvPools], PageStore]


@dataclass(slots=True)
class EngineParts:
    """What `call_in_loop` hands to its function."""

    config: EngineConfig
    model: ServedModel
    pools: KvPools
    cache: PrefixCache
    """What every part calls, so that each call is recorded where the configuration says so."""
    core: UnifiedRadixCache
    """The same cache without the recording, to look inside."""
    ledger: Ledger
    controller: CacheController
    scheduler: Scheduler
    executor: TorchExecutor
    capture: LogitsCapture | None
    what_if: WhatIf
    clock: Callable[[], float]
    open_store: StoreFactory
    store: PageStore | None = None
    recorder: RecordedCache | None = None
    census: Census = field(init=False)

    def __post_init__(self) -> None:
        self.census = Census(self.core.state)

    # ------------------------------------------------------------------ what operators ask

    @property
    def running_requests(self) -> int:
        return self.scheduler.running

    @property
    def waiting_requests(self) -> int:
        return self.scheduler.waiting

    @property
    def store_name(self) -> str | None:
        """The backend that is attached; None without storage."""
        return None if self.store is None else self.store.name

    def store_stats(self) -> StoreStats | None:
        return None if self.store is None else self.store.stats()

    def look(self) -> Gauges:
        """What no fact tells, for the metrics: sizes and ages of the live parts now."""
        state, stats = self.core.state, self.store_stats()
        self.census.advance()
        return Gauges(
            leased_pages={
                Tier.DEVICE: self.ledger.device.resident - state.device_evictable,
                Tier.HOST: self.ledger.host.resident - state.host_evictable,
            },
            host_mirror_pages=self.census.host_mirror_pages,
            ghost_pages=len(state.ghosts),
            ghost_capacity_pages=state.ghosts.capacity,
            namespace_pages=self.census.namespace_pages,
            running_requests=self.running_requests,
            queued_requests=self.waiting_requests,
            oldest_transfer_age_seconds={
                purpose: pending.oldest_seconds
                for purpose, pending in self.controller.oldest_pending().items()
                if pending.copies
            },
            link_ceiling_bytes_per_second=self.controller.link_ceilings,
            storage_used_bytes=stats.used_bytes if stats else 0,
            storage_quota_bytes=stats.quota_bytes if stats else 0,
            what_if=self.what_if.ratios(),
        )

    def audit(self) -> None:
        """Recount the structure and compare with the books; a difference is logged, and stays
        visible as `ledger_imbalance`."""
        self.controller.pump()  # what the last step did must be in the books before
        differences = self.ledger.audit(self.cache.recount())
        if differences:
            log.error("the books differ from a recount (booked - counted): %s", differences)

    # ------------------------------------------------------------------ storage comes and goes

    def check_detached(self) -> None:
        """Raise `StorageError` where storage is attached."""
        if self.store is not None:
            raise StorageError(f"storage is attached already ({self.config.storage_dir})")

    def attach_storage(self, store: PageStore) -> None:
        """Use a store that was opened. When this raises, it is still the caller's to close."""
        self.check_detached()
        self.controller.attach(storage_worker(store, self.config, self.pools))
        self.store = store

    def detach_storage(self) -> Future[None] | None:
        """Stop using storage; what is returned is done when the store is closed.

        A call that is stuck in the store keeps its directory locked until it ends.
        """
        store = self.store
        if store is None:
            return None
        self.store = None
        try:
            if not self.controller.detach(DETACH_SECONDS):
                log.warning(
                    "storage is detached, and a call to it has not returned yet: %s stays locked "
                    "until it does",
                    self.config.storage_dir,
                )
        finally:
            closed = close_apart(store)
        return closed

    def forget_stored(self, store: PageStore) -> None:
        """What the cache knew of the content of `store` is void."""
        if self.store is store:
            self.cache.attach_storage(self.clock())

    def save(self, timeout_seconds: float) -> bool:
        """Bring down to storage what the policies have put off, so that a restart finds it.

        For the end, when no request runs: write_back keeps pages on device alone, and
        store_on=evict on host alone, until they are evicted. False when the time was not enough.
        """
        end = self.clock() + timeout_seconds
        tiers = []
        if self.config.store_on is StoreOn.EVICT:
            tiers = [Tier.DEVICE, Tier.HOST]  # what is on device too leaves host without a store
        elif self.config.write_policy is WritePolicy.WRITE_BACK:
            tiers = [Tier.DEVICE]
        for tier in tiers if self.store is not None else []:
            progress = None
            while progress != (progress := self._progress(tier)):
                self.cache.evict(tier, self.ledger.tiers[tier].resident, self.clock())
                if not self.controller.drain(max(0.0, end - self.clock())):
                    return False
        return self.controller.drain(max(0.0, end - self.clock()))

    def _progress(self, tier: Tier) -> tuple[int, int]:
        """Changes as long as evicting from a tier achieves something."""
        return self.ledger.tiers[tier].resident, sum(
            b.ok_pages for b in self.ledger.copies.values()
        )

    def close(self, timeout_seconds: float) -> bool:
        """Stop copying and release storage; False when a copy had not returned in that time.

        Storage is released in any case: a call that is stuck in it keeps it until it ends.
        """
        try:
            return self.controller.close(timeout_seconds)
        finally:
            store, self.store = self.store, None
            closed = None if store is None else close_apart(store)
            if self.recorder is not None:
                self.recorder.end()
            if closed is not None:
                wait_closed(closed)


def cpu_transfer(pools: KvPools) -> Transfer:
    """Copies between device and host pools in the CPU's memory."""
    assert pools.host is not None, "made only where there is a host tier"
    return CpuTransfer([pools.device], [pools.host])


def file_store(config: EngineConfig, pools: KvPools) -> PageStore:
    """The file store in the configured directory."""
    if config.storage_dir is None:
        raise ConfigError("no storage directory is configured; start with --storage DIR")
    return FileStore(
        config.storage_dir,
        page_bytes=pools.spec.bytes_per_slot,
        quota_bytes=int(config.storage_gib * GIB),
    )


def assemble(
    config: EngineConfig,
    model: ServedModel,
    eos_token_ids: tuple[int, ...],
    *,
    make_transfer: Callable[[KvPools], Transfer] = cpu_transfer,
    open_store: StoreFactory = file_store,
) -> EngineParts:
    """Allocate the tiers, open storage, wire everything. Nothing runs yet.

    Raises `ConfigError` for sizes that do not fit, `StorageError` for a directory in use.
    """
    layout = model.layout
    page_bytes = layout.page_bytes(config.page_tokens)
    device_pages, host_pages = config.tier_pages(page_bytes)
    tiers = f"{device_pages} device and {host_pages} host pages of {page_bytes} bytes"
    # The device tier of a CPU is the machine's memory too. What is promised and not there would be
    # found missing by the kernel in the middle of a request, with a kill.
    check_fits((device_pages + host_pages) * page_bytes, tiers)
    try:
        pools = KvPools(layout, config.page_tokens, device_pages, host_pages)
    except (MemoryError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"cannot allocate {tiers}: {error}; lower --device-gib or --host-gib"
        ) from error
    core = UnifiedRadixCache(
        CacheConfig(
            device_pages=device_pages,
            host_pages=host_pages,
            page_tokens=config.page_tokens,
            pools=(pools.spec,),
            storage=config.storage_dir is not None,
            write_policy=config.write_policy,
            retention=config.retention,
            store_on=config.store_on,
            eviction=config.eviction,
            prefetch_policy=config.prefetch_policy,
            prefetch_threshold_tokens=config.prefetch_threshold_tokens,
            load_back_threshold_tokens=config.load_back_threshold_tokens,
        )
    )
    ledger = Ledger(config.page_tokens, (pools.spec,), device_pages, host_pages, (BACKEND,))
    clock = time.monotonic
    with ExitStack() as opened:
        store = None
        if config.storage_dir is not None:
            store = open_store(config, pools)
            opened.callback(store.close)  # or a failure below would leave its directory locked
        # The cache takes its own leases only; the shells see them as `LeaseView`s.
        cache = cast(PrefixCache, core)
        recorder = None
        if config.decision_log is not None:
            cache = recorder = RecordedCache.to_file(cache, config.decision_log)
        controller = CacheController(
            cache,
            ledger.fold,
            make_transfer(pools) if pools.host is not None else None,
            storage_worker(store, config, pools) if store is not None else None,
            deadlines=Deadlines(load_back=config.load_timeout_seconds),
            clock=clock,
        )
        capture = (
            LogitsCapture(config.capture_logits_mib << 20) if config.capture_logits_mib else None
        )
        executor = TorchExecutor(
            model.model,
            pools,
            wait_layer=controller.wait_layer,
            load_timeout_seconds=config.load_timeout_seconds,
            capture=capture,
        )
        scheduler = Scheduler(
            cache,
            executor,
            config=SchedulerConfig(
                policy=config.schedule_policy,
                max_running=config.max_running_requests,
                max_step_tokens=config.max_batch_tokens,
                max_prefill_tokens=config.max_batch_tokens,
                eos_token_ids=frozenset(eos_token_ids),
            ),
            sink=ledger.fold,
            pump=controller.pump,
            clock=clock,
        )
        parts = EngineParts(
            config=config,
            model=model,
            pools=pools,
            cache=cache,
            core=core,
            ledger=ledger,
            controller=controller,
            scheduler=scheduler,
            executor=executor,
            capture=capture,
            what_if=_what_if(config, device_pages, host_pages, page_bytes),
            clock=clock,
            open_store=open_store,
            store=store,
            recorder=recorder,
        )
        opened.pop_all()
    return parts


def _what_if(config: EngineConfig, device_pages: int, host_pages: int, page_bytes: int) -> WhatIf:
    stored_bytes = config.storage_gib * GIB if config.storage_dir is not None else 0
    capacities = {
        Tier.DEVICE: device_pages,
        Tier.HOST: host_pages,
        Tier.STORAGE: int(stored_bytes) // page_bytes,
    }
    return WhatIf(config.page_tokens, capacities, config.retention)


def storage_worker(store: PageStore, config: EngineConfig, pools: KvPools) -> StorageWorker:
    """The threads around a store."""
    if pools.host is None:
        raise ConfigError("storage needs a host tier to pass through; raise --host-gib above 0")
    return StorageWorker(
        {"kv": store},
        [pools.host],
        page_tokens=config.page_tokens,
        layout=f"{pools.layout.dtype}/page-first/{len(pools.layout.planes)}",
    )
