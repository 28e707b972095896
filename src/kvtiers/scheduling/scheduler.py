"""The step loop: one scheduler for the live engine and for virtual time.

Owns the order of one step. Everything with a rule of its own stands in its own module:

    waiting_queue, policies   order of admission          sharing     waiting for a shared prefix
    admission, prefill_adder  who joins the batch         forks       n answers to one prompt
    growth                    slots for decode, retract   settlement  results, commits, tokens
    roster                    where a request stands      request     its state machine

It knows neither torch nor a clock of its own: time is `clock()`, and whatever carries out copies
is behind `pump`. One thread calls it.

One step:  pump acks · tick · expire deadlines · settle parked · grow decode · continue prefill
           · admit · pump orders · run · pump acks · settle.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kvtiers.core.interface import PrefixCache
from kvtiers.errors import ProtocolError
from kvtiers.events import Fact, FactTuple
from kvtiers.scheduling.admission import Admission
from kvtiers.scheduling.config import SchedulerConfig
from kvtiers.scheduling.executor import BatchResult, Executor
from kvtiers.scheduling.growth import Growth
from kvtiers.scheduling.prefill_adder import PrefillAdder
from kvtiers.scheduling.prefill_stats import PrefillStats, PrefillTally
from kvtiers.scheduling.request import Request, RequestState
from kvtiers.scheduling.roster import Roster, StepOutput
from kvtiers.scheduling.settlement import Settlement
from kvtiers.types import RequestOutcome


class Scheduler:
    """Decides in each step what runs, runs it, and books the result.

    `sink` takes facts in order: those that only the scheduler knows (`REQUEST_ENDED`, `RETRACTED`,
    `FIRST_TOKEN`, `DECODED`, `PREFILLED`, `FORWARD_STALL`, `EVICTION_TIMED`) and the cache's own
    about admission; `pump` must drain the rest to the same sink. `pump` carries out the cache's
    orders and delivers what has been acknowledged, without blocking; True says that it changed
    something. `report`, if given, gets the `PrefillStats` of every step that booked any prefill.
    """

    def __init__(
        self,
        cache: PrefixCache,
        executor: Executor,
        *,
        config: SchedulerConfig,
        sink: Callable[[list[FactTuple]], None],
        pump: Callable[[], bool],
        clock: Callable[[], float],
        report: Callable[[PrefillStats], None] | None = None,
    ) -> None:
        self._cache = cache
        self._executor = executor
        self._config = config
        self._sink = sink
        self._pump = pump
        self._clock = clock
        self._report = report
        self._roster = Roster(cache, config)
        self._admission = Admission(cache, config, self._roster, sink, clock)
        self._growth = Growth(cache, config, self._roster)
        self._settlement = Settlement(cache, config, self._roster)
        self._deadlines: list[tuple[float, int]] = []
        self._changed_late = False  # the last step ended on news that it has not looked at

    # ------------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        """Queue a request and start its prefetch.

        One that can never fit is refused at once: it is `ended` when this returns, and the next
        step's outputs say so. Raises `ProtocolError` for an id that is live already.
        """
        if request.request_id in self._roster.live:
            raise ProtocolError(f"request {request.request_id} is live already; ids are unique")
        now = self._clock()
        config = self._cache.config
        needs_pages = -(-request.final_tokens // config.page_tokens)
        if needs_pages > config.device_pages:
            self._roster.refuse(
                request,
                needs_pages,
                f"request {request.request_id} needs {needs_pages} pages of device memory for "
                f"{request.prompt_tokens} prompt tokens and up to {request.params.max_tokens} "
                f"output tokens; the device holds {config.device_pages} pages of "
                f"{config.page_tokens} tokens: lower max_tokens or raise the device tier",
                now,
            )
        else:
            self._roster.enlist(request, now)
            if request.deadline is not None:
                self._remember_deadline(request.deadline, request.request_id)
        self._flush_facts()

    def cancel(self, request_id: int) -> bool:
        """End a request on behalf of its client, in any state; False when it is not live."""
        return self.finish(request_id, RequestOutcome.CANCELLED)

    def finish(
        self, request_id: int, outcome: RequestOutcome = RequestOutcome.STOP, message: str = ""
    ) -> bool:
        """End a request for a reason that only the caller sees (a stop string); False: not live.

        The caller knows, so no step output follows.
        """
        request = self._roster.live.get(request_id)
        if request is None:
            return False
        self._admission.forget(request)
        self._roster.end(request, outcome, self._clock(), message=message)
        self._roster.outputs.pop()
        self._flush_facts()
        return True

    def request(self, request_id: int) -> Request | None:
        """The live request with this id."""
        return self._roster.live.get(request_id)

    @property
    def has_work(self) -> bool:
        """Whether any request is live, or an output has not been fetched by a step."""
        return bool(self._roster.live or self._roster.outputs)

    @property
    def running(self) -> int:
        """Requests that hold a lease."""
        return self._roster.running

    @property
    def waiting(self) -> int:
        """Live requests that hold none."""
        return len(self._roster.live) - self._roster.running

    # ------------------------------------------------------------------ the step

    def step(self) -> list[StepOutput]:
        """One step; returns what became of requests since the last one.

        A step may find nothing to compute while requests wait for copies; then the caller waits
        for an acknowledgement, at most until `idle_until`.
        """
        roster, settlement = self._roster, self._settlement
        settlement.tally = PrefillTally()
        self._changed_late = False
        if self._pump():
            roster.releases += 1
        now = self._clock()
        self._cache.tick(now)
        self._expire(now)
        settlement.settle_parked(now)
        adder = PrefillAdder(self._cache, self._config, roster.running)
        self._growth.fill(adder, now)
        for request in roster.prefilling.values():
            if not settlement.is_parked(request):
                adder.add_chunk(request)
        self._admission.fill(adder, now)
        self._run(adder)
        settlement.tell_gaps()
        self._report_prefill()
        self._flush_facts()
        outputs = roster.outputs
        roster.outputs = []
        return outputs

    def idle_until(self) -> float | None:
        """When to step again although nothing was acknowledged, at the latest.

        None: there is nothing to wait for. Meant for a caller whose last step computed nothing;
        in virtual time the clock may jump to the earlier of this and the next event.
        """
        if self._roster.outputs or self._changed_late:
            return self._clock()
        times: list[float] = []
        while self._deadlines and self._deadlines[0][1] not in self._roster.live:
            heapq.heappop(self._deadlines)
        if self._deadlines:
            times.append(self._deadlines[0][0])
        if len(self._roster.waiting) or self._growth.is_short:
            times.append(self._clock() + self._config.retry_seconds)
        return min(times, default=None)

    def _run(self, adder: PrefillAdder) -> None:
        """Hand out the orders, run the batch and settle it."""
        changed = self._pump()
        if changed:
            self._roster.releases += 1
        for request in self._settlement.void_failed(self._clock()):
            adder.remove(request)
        if not adder.planned:
            # Whoever waits for what came just now was passed before it came.
            self._changed_late = changed
            return
        repeat = self._growth.repeats(adder, self._clock())
        batch = adder.build(repeat)
        loading: set[int] = set()
        if batch.load_ops:
            loading = {i for i, chunk in enumerate(batch.chunks) if chunk.lease.load_ops}
        result = self._executor.run(batch)
        if self._pump():
            self._roster.releases += 1
        if result.stall_seconds > 0:
            self._roster.facts.append((Fact.FORWARD_STALL, result.stall_seconds))
        self._tell_prefill(adder.planned, result)
        self._settlement.settle(adder.planned, result, self._clock(), loading)

    def _tell_prefill(self, planned: list[tuple[Request, int]], result: BatchResult) -> None:
        """How long the pass took, if it says what prefill costs: nothing else in it, all well."""
        if result.failed or any(each.state is not RequestState.PREFILLING for each, _ in planned):
            return
        tokens = sum(computed for _, computed in planned)
        seconds = result.seconds - result.stall_seconds
        self._roster.facts.append((Fact.PREFILLED, tokens, seconds))

    def _remember_deadline(self, deadline: float, request_id: int) -> None:
        live = self._roster.live
        if len(self._deadlines) > 2 * len(live) + 64:  # mostly of requests that have ended
            self._deadlines = [entry for entry in self._deadlines if entry[1] in live]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline, request_id))

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            request = self._roster.live.get(request_id)
            if request is not None:
                self._admission.forget(request)
                self._roster.end(
                    request,
                    RequestOutcome.DEADLINE,
                    now,
                    message=f"request {request_id} was not finished within "
                    f"{request.deadline_seconds} s",
                )

    def _report_prefill(self) -> None:
        if self._report is None:
            return
        stats = self._settlement.tally.stats(self._roster.running, self.waiting)
        if stats is not None:
            self._report(stats)

    def _flush_facts(self) -> None:
        """Hand on what has become true, so that whoever sees an output finds it booked."""
        facts = self._cache.take_facts() + self._roster.facts
        if facts:
            self._roster.facts = []
            self._sink(facts)
