"""Replaying many configurations at once, in processes of their own.

Each worker gets the trace once, at its start. A configuration comes back as an `Evaluation`, which
is small; the whole outcome of a replay (series, ledger) comes back only where it is asked for.

*Screening* replays the whole trace with every output cut to its first token, with pages as large as
the trace's blocks and with twice as many tokens in a step: most of a replay's time goes into
decoding, into small pages and into steps, while hits, copies and prefill queueing depend little on
any of these. What the screening ranks first is replayed in full before anything is recommended.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import connection
from typing import Any

import numpy as np

from kvtiers.errors import ConfigError
from kvtiers.planner.columns import TraceColumns
from kvtiers.planner.machines import Machine
from kvtiers.planner.models import ModelShape
from kvtiers.planner.prompts import PromptKeys
from kvtiers.planner.replay import Patience, ReplayConfig, replay
from kvtiers.planner.search import Candidate
from kvtiers.planner.serving_settings import NOTHING_KNOWN, KnownSettings, ServingSettings
from kvtiers.planner.summary import summarise
from kvtiers.planner.units import GIB
from kvtiers.types import CacheConfig, PoolSpec

SCREENING_OUTPUT_TOKENS = 1
SCREENING_PAGE_TOKENS_MAX = 512
SCREENING_STEP_FACTOR = 2


@dataclass(frozen=True, slots=True)
class Setting:
    """What all configurations of a plan have in common."""

    model: ModelShape
    machine: Machine
    page_tokens: int
    speed: float = 1.0
    options: KnownSettings = NOTHING_KNOWN
    """What is asked for instead of the machine's own settings."""

    @property
    def serving(self) -> ServingSettings:
        """How the server of all of them batches and asks storage."""
        return self.machine.serving(self.options)

    @property
    def page_gib(self) -> float:
        """What one page takes."""
        return self.model.kv_bytes_per_token * self.page_tokens / GIB

    def screening(self, block_tokens: int) -> Setting:
        """The setting that a screening replays."""
        page_tokens = max(self.page_tokens, min(block_tokens, SCREENING_PAGE_TOKENS_MAX))
        step_tokens = SCREENING_STEP_FACTOR * self.serving.max_batch_tokens
        options = replace(self.options, max_batch_tokens=step_tokens)
        return replace(self, page_tokens=page_tokens, options=options)

    def replay_config(self, candidate: Candidate) -> ReplayConfig:
        """A candidate as a replay's configuration."""
        page_bytes = self.model.kv_bytes_per_token * self.page_tokens
        serving = self.serving

        def pages(gib: float) -> float:
            return gib if math.isinf(gib) else math.floor(gib * GIB / page_bytes)

        cache = CacheConfig(
            device_pages=int(pages(candidate.device_gib)),
            host_pages=int(pages(candidate.host_gib)),
            page_tokens=self.page_tokens,
            pools=(PoolSpec("kv", page_bytes),),
            storage=candidate.storage_gib > 0,
            write_policy=candidate.write_policy,
            retention=candidate.retention,
            prefetch_policy=serving.prefetch_policy,
            prefetch_threshold_tokens=serving.prefetch_threshold_tokens,
        )
        return ReplayConfig(
            cache,
            self.machine,
            serving.scheduler(),
            storage_pages=pages(candidate.storage_gib),
            speed=self.speed,
        )


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a replay of one configuration came to.

    `outcome` is the whole summary (`planner.summary`), kept for full replays only.
    """

    candidate: Candidate
    full: bool
    hit_ratio: float
    hit_ratios: dict[str, float]
    ttft_p50_seconds: float
    ttft_p95_seconds: float
    prefill_share: float
    refused: int
    waiting_at_last_arrival: int
    lost_tokens: int
    regret_tokens: int
    backed_up_bytes: float
    written_bytes_per_day: float
    limits: tuple[str, ...]
    outcome: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A replay that was not worth its end: its TTFT p95 is above `ttft_p95_above_seconds`, which
    was proved when `requests` requests had been answered."""

    candidate: Candidate
    requests: int
    ttft_p95_above_seconds: float


def evaluate(
    columns: TraceColumns,
    keys: PromptKeys,
    setting: Setting,
    candidate: Candidate,
    *,
    full: bool,
    patience_seconds: float | None = None,
) -> Evaluation | GivenUp:
    """Replay one configuration, in this process.

    It is given up as soon as its TTFT p95 is proved to be above `patience_seconds`.
    """
    patience = None
    if patience_seconds is not None:
        patience = Patience(patience_seconds, late_max(columns.requests))
    result = replay(columns, setting.replay_config(candidate), keys=keys, patience=patience)
    if not result.complete:
        assert patience_seconds is not None
        return GivenUp(candidate, len(result.requests), patience_seconds)
    outcome = summarise(result)
    ttft = outcome["ttft_seconds"] or {"p50": math.inf, "p95": math.inf}
    losses = outcome["losses"]
    return Evaluation(
        candidate=candidate,
        full=full,
        hit_ratio=outcome["hits"]["hit_ratio"],
        hit_ratios=outcome["hits"]["ratios"],
        ttft_p50_seconds=ttft["p50"],
        ttft_p95_seconds=ttft["p95"],
        prefill_share=outcome["compute"]["prefill_share"],
        refused=outcome["requests"]["refused"],
        waiting_at_last_arrival=outcome["requests"]["waiting_at_last_arrival"],
        lost_tokens=losses["lost_tokens"],
        regret_tokens=sum(losses["regret_tokens"].values()),
        backed_up_bytes=outcome["links"]["device_to_host"]["bytes"],
        written_bytes_per_day=outcome["storage"]["written_bytes_per_day"],
        limits=tuple(outcome["limits"]),
        outcome=outcome if full else None,
    )


def late_max(requests: int) -> int:
    """How many of so many values may be above a limit while their 95th percentile need not be.

    The percentile lies between the values of rank `floor(0.95 (n - 1))` and the next one, from 0;
    fewer values (refused requests have none) allow fewer.
    """
    return requests - math.floor(0.95 * (requests - 1)) - 1


def with_short_outputs(columns: TraceColumns) -> TraceColumns:
    """The same trace with outputs cut to what screening decodes."""
    cut = np.minimum(columns.output_tokens, SCREENING_OUTPUT_TOKENS)
    return replace(columns, output_tokens=cut, output_starts=None, output_block_ids=None)


class Pool:
    """Processes that replay configurations of one trace. Use as a context manager.

    Left by an exception, an interrupt too, it ends them at once, in the middle of their replays.
    """

    def __init__(self, columns: TraceColumns, setting: Setting, processes: int) -> None:
        self._processes = processes
        self._not_ours = set(multiprocessing.active_children())
        self._executor = ProcessPoolExecutor(
            processes,
            # not fork: a progress bar's thread may hold a lock at that moment
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(columns, setting),
        )

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            for process in set(multiprocessing.active_children()) - self._not_ours:
                process.terminate()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def map(
        self,
        candidates: Sequence[Candidate],
        *,
        full: bool,
        patience_seconds: Callable[[Candidate], float | None] = lambda candidate: None,
    ) -> Iterator[Evaluation | GivenUp]:
        """Evaluations in the order in which they are done.

        `patience_seconds` is asked when a candidate's turn comes, so that it may depend on what
        has been yielded until then. Raises `ConfigError` when a process was killed.
        """
        waiting = deque(candidates)
        running: set[Future[Evaluation | GivenUp]] = set()
        try:
            while waiting or running:
                while waiting and len(running) < self._processes:
                    candidate = waiting.popleft()
                    patience = patience_seconds(candidate)
                    with _interrupts_held_back():
                        running.add(self._executor.submit(_work, candidate, full, patience))
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        except BrokenProcessPool:
            raise ConfigError(
                f"one of {self._processes} replaying processes was killed, most likely because "
                "memory ran out; give fewer --processes"
            ) from None


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ctrl-C waits meanwhile, and a process that is started meanwhile never hears of it.

    A terminal interrupts the workers as well; each would print a traceback of its own. They end
    with the pool.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_worker: dict[bool, tuple[TraceColumns, PromptKeys, Setting]] = {}


def _end_with_parent() -> None:
    """A plan that is killed takes its workers with it, in the middle of a replay too."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "workers have a parent"
    connection.wait([parent.sentinel])
    os._exit(1)


def _start_worker(columns: TraceColumns, setting: Setting) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # late copies are part of the outcome; a worker has nobody to log them to
    logging.getLogger("kvtiers.runtime").setLevel(logging.ERROR)
    short = with_short_outputs(columns)
    _worker[True] = (columns, PromptKeys(columns), setting)
    _worker[False] = (short, PromptKeys(short), setting.screening(columns.block_tokens))


def _work(candidate: Candidate, full: bool, patience_seconds: float | None) -> Evaluation | GivenUp:
    columns, keys, setting = _worker[full]
    return evaluate(columns, keys, setting, candidate, full=full, patience_seconds=patience_seconds)
