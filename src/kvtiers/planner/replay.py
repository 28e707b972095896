"""Full replay: the scheduler and the cache that serve, in virtual time.

Only what touches the world is replaced: the executor (`VirtualExecutor`), the links
(`VirtualTransfer`), storage (`VirtualStorage`) and the clock. Requests arrive when the trace says,
whether or not the ones before them are done (open loop). What is decided, booked and counted is
decided, booked and counted by the code that serves, so the result's totals are the ledger's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from kvtiers.core.cache import UnifiedRadixCache
from kvtiers.core.interface import PrefixCache
from kvtiers.errors import ConfigError, InvariantViolation
from kvtiers.events import FactTuple
from kvtiers.metrics.ledger import Ledger
from kvtiers.planner.columns import TraceColumns
from kvtiers.planner.flows import Flows
from kvtiers.planner.machines import Machine
from kvtiers.planner.prompts import END_TOKEN, PromptKeys
from kvtiers.planner.serving_settings import settings_for
from kvtiers.planner.virtual_clock import VirtualClock
from kvtiers.planner.virtual_executor import VirtualExecutor
from kvtiers.planner.virtual_storage import BACKEND, VirtualStorage
from kvtiers.runtime.controller import CacheController
from kvtiers.scheduling.config import SchedulerConfig
from kvtiers.scheduling.executor import SamplingParams
from kvtiers.scheduling.request import Request
from kvtiers.scheduling.roster import StepOutput
from kvtiers.scheduling.scheduler import Scheduler
from kvtiers.transfer.virtual import VirtualTransfer
from kvtiers.types import CacheConfig, HitSplit, Namespace, RequestOutcome

TICK_SECONDS = 0.02
"""How often the cache is told that time has passed, as in the live engine."""

LAYERS = 32
"""Layers of a load-back that overlap with compute."""

_STUCK_ROUNDS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """What is replayed: tiers and policies, the machine, how the scheduler batches.

    `cache` has its sizes in pages of `cache.page_tokens`, and one pool with the model's bytes per
    page. `storage_pages` is the store's size and may be infinite; it counts only with
    `cache.storage`. `speed` above 1 lets the trace's requests arrive that much faster.
    """

    cache: CacheConfig
    machine: Machine
    scheduler: SchedulerConfig = field(default_factory=lambda: settings_for().scheduler())
    storage_pages: float = math.inf
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not self.speed > 0:
            raise ConfigError(f"speed is {self.speed}; it must be positive")


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """One request after its end; seconds. Times are None where it never got so far."""

    number: int
    arrival: float
    outcome: RequestOutcome
    prompt_tokens: int
    output_tokens: int
    split: HitSplit | None
    queued_seconds: float | None
    ttft_seconds: float | None
    e2e_seconds: float


@dataclass(frozen=True, slots=True)
class Patience:
    """When a replay is given up: once more than `late_max` requests had their first token later
    than `ttft_seconds`."""

    ttft_seconds: float
    late_max: int


@dataclass(frozen=True, slots=True, eq=False)
class ReplayResult:
    """Everything that a replay found out. Not `complete`: it was given up (`Patience`)."""

    config: ReplayConfig
    requests: list[ServedRequest]
    ledger: Ledger
    flows: Flows
    seconds: float
    """Virtual time from the first arrival to the last end."""
    busy_seconds: float
    prefill_seconds: float
    stall_seconds: float
    steps: int
    storage_held_pages: int
    storage_written_pages: int
    waiting_at_last_arrival: int
    """Requests before the last one that waited when it arrived."""
    complete: bool = True


def replay(
    columns: TraceColumns,
    config: ReplayConfig,
    *,
    keys: PromptKeys | None = None,
    progress: Callable[[int], None] | None = None,
    patience: Patience | None = None,
) -> ReplayResult:
    """Serve a whole trace in virtual time, or as much of it as `patience` lasts for.

    `progress` is told the number of requests that have arrived, now and then. Raises
    `InvariantViolation` when the books do not balance at the end, or when nothing moves any more.
    """
    return _Replay(columns, config, keys or PromptKeys(columns), patience).run(progress)


class _Replay:
    def __init__(
        self,
        columns: TraceColumns,
        config: ReplayConfig,
        keys: PromptKeys,
        patience: Patience | None,
    ) -> None:
        self.columns = columns
        self.patience = patience
        self.late_requests = 0
        self.config = config
        self.keys = keys
        self.namespace = Namespace("replay")
        self.arrivals = (
            (columns.arrival_seconds - columns.arrival_seconds[0]) / config.speed
        ).tolist()
        self.next_request = 0
        self.clock = VirtualClock()
        self.flows = Flows()
        self.served: list[ServedRequest] = []

        cache = config.cache
        # a lease comes back to the cache that granted it, so the narrower type is the right one
        self.cache = cast(PrefixCache, UnifiedRadixCache(cache))
        self.ledger = Ledger(
            cache.page_tokens, cache.pools, cache.device_pages, cache.host_pages, (BACKEND,)
        )
        machine = config.machine
        self.transfer = (
            VirtualTransfer(
                self.clock,
                cache.pools,
                device_to_host=machine.device_to_host,
                host_to_device=machine.host_to_device,
                layers=LAYERS,
            )
            if cache.host_pages
            else None
        )
        self.storage = (
            VirtualStorage(
                self.clock,
                capacity_pages=config.storage_pages,
                page_tokens=cache.page_tokens,
                page_bytes=self.ledger.page_bytes,
                read=machine.storage_read,
                write=machine.storage_write,
                observe=self.flows.book,
            )
            if cache.storage
            else None
        )
        self.controller = CacheController(
            self.cache, self._sink, self.transfer, self.storage, clock=self.clock
        )
        self.executor = VirtualExecutor(
            self.clock,
            machine.cost,
            self.transfer,
            output_of=self.keys.output,
            next_event=self._next_outside_event,
            answers_stop=columns.output_tokens_max is not None,
        )
        self.scheduler = Scheduler(
            self.cache,
            self.executor,
            config=config.scheduler,
            sink=self._sink,
            pump=self.controller.pump,
            clock=self.clock,
        )

    # ------------------------------------------------------------------ the loop

    def run(self, progress: Callable[[int], None] | None) -> ReplayResult:
        clock, scheduler, executor = self.clock, self.scheduler, self.executor
        next_tick = 0.0
        stuck_rounds = 0
        waiting_at_last_arrival: int | None = None
        complete = True
        while True:
            before = clock()
            if self._arrive(before) and progress is not None:
                progress(self.next_request)
            if self.next_request == len(self.arrivals) and waiting_at_last_arrival is None:
                waiting_at_last_arrival = scheduler.waiting - 1  # others than the last one itself
            if before >= next_tick:
                self.cache.tick(before)
                next_tick = before + TICK_SECONDS
            batches = executor.batches
            outputs, look_again = self._step(before)
            for output in outputs:
                if output.outcome is not None:
                    self._note_end(output)
            if self.patience is not None and self.late_requests > self.patience.late_max:
                complete = False
                break
            now = clock()
            if executor.batches == batches:
                when = self._next_event(look_again)
                if when is None:
                    break
                now = max(now, when)
                clock.advance_to(now)
            if now > before:
                stuck_rounds = 0
                self.flows.levels(before, now, scheduler.waiting, scheduler.running)
            elif not outputs:
                stuck_rounds += 1
                self._require_movement(stuck_rounds)
        if complete:
            self._require_clean_end()
        return ReplayResult(
            config=self.config,
            requests=self.served,
            ledger=self.ledger,
            flows=self.flows,
            seconds=clock(),
            busy_seconds=executor.busy_seconds,
            prefill_seconds=executor.prefill_seconds,
            stall_seconds=executor.stall_seconds,
            steps=executor.batches,
            storage_held_pages=self.storage.held_pages if self.storage else 0,
            storage_written_pages=self.storage.written_pages if self.storage else 0,
            waiting_at_last_arrival=waiting_at_last_arrival or 0,
            complete=complete,
        )

    def _step(self, now: float) -> tuple[list[StepOutput], float]:
        """One step; returns when to look again, at the latest, where it computed nothing.

        Where no request is live only copies go on, so that is all that is looked after: with
        storage half of all steps are such.
        """
        if self.scheduler.has_work:
            return self.scheduler.step(), _or_inf(self.scheduler.idle_until())
        self.controller.pump()
        self.cache.tick(now)
        return [], now if self.controller.pump() else math.inf

    def _arrive(self, now: float) -> bool:
        first = self.next_request
        while self.next_request < len(self.arrivals) and self.arrivals[self.next_request] <= now:
            number = self.next_request
            self.next_request += 1
            # room is kept for what was allowed, and the answer ends where it did
            params = SamplingParams(
                max_tokens=self.keys.output_tokens_max(number),
                stop_token_ids=(END_TOKEN,),
                ignore_eos=True,
            )
            self.scheduler.add(
                Request(
                    number,
                    self.keys.prompt(number),
                    params,
                    self.namespace,
                    self.arrivals[number],
                )
            )
        return self.next_request > first

    def _note_end(self, output: StepOutput) -> None:
        request = output.request
        assert request.outcome is not None
        assert request.ended_at is not None
        self.executor.forget(request.request_id)
        arrival = request.arrival
        ttft = _since(arrival, request.first_token_at)
        if self.patience is not None and ttft is not None and ttft > self.patience.ttft_seconds:
            self.late_requests += 1
        self.served.append(
            ServedRequest(
                number=request.request_id,
                arrival=arrival,
                outcome=request.outcome,
                prompt_tokens=request.prompt_tokens,
                output_tokens=len(request.output),
                split=request.split,
                queued_seconds=_since(arrival, request.admitted_at),
                ttft_seconds=ttft,
                e2e_seconds=request.ended_at - arrival,
            )
        )

    # ------------------------------------------------------------------ time

    def _next_event(self, look_again: float) -> float | None:
        """When to step again after a step that computed nothing; None: all is done."""
        times = [look_again, self._next_outside_event(), _or_inf(self.controller.next_deadline())]
        when = min(times)
        if not math.isinf(when):
            return when
        if self.scheduler.has_work or not self.controller.idle:
            raise InvariantViolation(
                f"at {self.clock():.3f} s {self.scheduler.waiting} requests wait and "
                f"{self.scheduler.running} run, but nothing will ever happen"
            )
        return None

    def _next_outside_event(self) -> float:
        """The next arrival or end of a copy."""
        when = math.inf
        if self.next_request < len(self.arrivals):
            when = self.arrivals[self.next_request]
        if self.transfer is not None:
            when = min(when, _or_inf(self.transfer.next_completion()))
        if self.storage is not None:
            when = min(when, self.storage.next_completion())
        return when

    # ------------------------------------------------------------------ books

    def _sink(self, facts: list[FactTuple]) -> None:
        self.ledger.fold(facts)
        self.flows.take(facts, self.clock(), self.ledger.page_bytes)

    def _require_movement(self, stuck_rounds: int) -> None:
        if stuck_rounds > _STUCK_ROUNDS_MAX:
            raise InvariantViolation(
                f"time stands still at {self.clock():.6f} s with {self.scheduler.waiting} "
                f"requests waiting and {self.scheduler.running} running"
            )

    def _require_clean_end(self) -> None:
        self.controller.pump()
        self.ledger.audit(self.cache.recount())
        self.ledger.check()
        left = {name: count for name, count in self.ledger.open_ends().items() if count}
        if left:
            raise InvariantViolation(f"the replay has ended and these have not: {left}")


def _since(start: float, end: float | None) -> float | None:
    return None if end is None else end - start


def _or_inf(when: float | None) -> float:
    return math.inf if when is None else when
