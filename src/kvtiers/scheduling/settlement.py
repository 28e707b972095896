"""From a batch's result to commits, tokens and ends.

Owns what happens with each chunk of a batch once it has run. It must not know queues' order or
budgets. For each chunk, in order:

    the attempt was voided            nothing counts; the request is admitted anew
    its result is unusable            its loads failed: anew; they came too late for this pass,
                                      but came: the chunk runs again; else the request fails
    its loads are not acknowledged    parked: it is in no batch until they are
    else                              committed, booked, and its token, if any, appended

A lease is committed only when `load_ops` is empty and it is not voided. Prefill commits after each
chunk, decode where a page is complete: pages become visible to others at these moments.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from kvtiers.core.interface import Blocked, PrefixCache
from kvtiers.events import Fact
from kvtiers.scheduling.config import SchedulerConfig
from kvtiers.scheduling.executor import BatchResult, TokenResult
from kvtiers.scheduling.prefill_stats import PrefillTally
from kvtiers.scheduling.request import Request, RequestState
from kvtiers.scheduling.roster import Roster, StepOutput
from kvtiers.types import Attempt, RequestOutcome


class Settlement:
    """Books results. `tally` collects the prefill of the current step."""

    def __init__(self, cache: PrefixCache, config: SchedulerConfig, roster: Roster) -> None:
        self._cache = cache
        self._config = config
        self._eos_token_ids = config.eos_token_ids
        self._roster = roster
        self._page_tokens = cache.config.page_tokens
        self._parked: dict[int, tuple[int, TokenResult | None] | None] = {}
        """What a pass computed for a request whose loads are not acknowledged; None: it failed."""
        self._gaps: dict[float, int] = {}
        self.tally = PrefillTally()

    def is_parked(self, request: Request) -> bool:
        """Whether a pass with the request waits for its loads' acknowledgements to be settled."""
        return request.request_id in self._parked

    def settle_parked(self, now: float) -> None:
        """Settle what was computed before, where the loads have been acknowledged since."""
        for request_id, parked in list(self._parked.items()):
            request = self._roster.live.get(request_id)
            if request is None:
                del self._parked[request_id]
            elif request.lease is not None and (request.lease.voided or not request.lease.load_ops):
                del self._parked[request_id]
                if parked is None:
                    self._retry(request, now)
                else:
                    self._settle_prefill(request, *parked, now)

    def void_failed(self, now: float) -> list[Request]:
        """Before a batch runs: give up attempts whose loads have failed by now."""
        voided = [
            request
            for request in self._roster.prefilling.values()
            if request.lease is not None and request.lease.voided
        ]
        for request in voided:
            self._parked.pop(request.request_id, None)
            self._retry(request, now)
        return voided

    def settle(
        self,
        planned: list[tuple[Request, int]],
        result: BatchResult,
        now: float,
        loading: Container[int] = (),
    ) -> None:
        """Settle a batch; `result.results[i]` belongs to `planned[i]`.

        `loading` holds the indices of those that waited for loads when the pass began.
        """
        prefilling = RequestState.PREFILLING
        results, failed = result.results, result.failed
        for index, (request, computed) in enumerate(planned):
            if index in failed:
                self._failed(request, failed[index], now, was_loading=index in loading)
            elif request.state is prefilling:
                self._settle_prefill(request, computed, results[index], now)
            elif result.repeated > 1:
                self._settle_repeated(request, result, index, now)
            else:
                self._settle_decode(request, results[index], now)

    def tell_gaps(self) -> None:
        """One DECODED fact per time between tokens that occurred in this step: one, usually."""
        if self._gaps:
            facts = self._roster.facts
            facts.extend((Fact.DECODED, tokens, gap) for gap, tokens in self._gaps.items())
            self._gaps.clear()

    # ------------------------------------------------------------------ one chunk

    def _settle_prefill(
        self, request: Request, computed: int, token: TokenResult | None, now: float
    ) -> None:
        lease = request.lease
        assert lease is not None, "a computed request holds a lease"
        if lease.voided:
            self._retry(request, now)
        elif lease.load_ops:
            self._parked[request.request_id] = (computed, token)
        else:
            self._commit_prefill(request, computed, now)
            if token is not None:
                self._roster.decodes(request)
                self._fork(request, now)
                self._append(request, token, now)

    def _settle_decode(self, request: Request, token: TokenResult | None, now: float) -> None:
        assert token is not None, "the last position of a key is always sampled"
        request.computed_tokens += 1
        if request.computed_tokens % self._page_tokens == 0:
            lease = request.lease
            assert lease is not None, "a computed request holds a lease"
            self._cache.commit(lease, request.key, request.computed_tokens, now)
        self._append(request, token, now)

    def _settle_repeated(
        self, request: Request, result: BatchResult, index: int, now: float
    ) -> None:
        """Several tokens of a decoding request at once, evenly spread over the time they took."""
        token = result.results[index]
        lease, since = request.lease, request.last_token_at
        assert token is not None
        assert lease is not None
        assert since is not None, "only decoding requests are repeated"
        gap = (now - since) / result.repeated
        self._gaps[gap] = self._gaps.get(gap, 0) + result.repeated - 1
        earlier = result.earlier[index]
        request.append_all(earlier, now)
        pages_before = request.computed_tokens // self._page_tokens
        request.computed_tokens += result.repeated
        if request.computed_tokens // self._page_tokens > pages_before:
            self._cache.commit(lease, request.key, request.computed_tokens, now)
        request.last_token_at = now - gap
        self._append(request, token, now, earlier)

    def _commit_prefill(self, request: Request, computed: int, now: float) -> None:
        lease = request.lease
        assert lease is not None
        first = not request.booked
        request.computed_tokens += computed
        self._cache.commit(lease, request.key, request.computed_tokens, now)
        if first:
            request.booked = True
            if request.split is None:
                request.split = lease.split
        self.tally.add(request.attempt, computed, lease.split if first else None)
        self._roster.in_compute.update(request)

    def _append(
        self, request: Request, token: TokenResult, now: float, earlier: Sequence[int] = ()
    ) -> None:
        last_token_at = request.last_token_at
        if last_token_at is None:
            self._roster.facts.append((Fact.FIRST_TOKEN, request.request_id, now - request.arrival))
        else:
            gap = now - last_token_at
            self._gaps[gap] = self._gaps.get(gap, 0) + 1
        value = token.token
        request.append(value, now)
        params = request.params
        if value in params.stop_token_ids or (
            value in self._eos_token_ids and not params.ignore_eos
        ):
            outcome = RequestOutcome.STOP
        elif request.tokens > request.final_tokens:
            outcome = RequestOutcome.LENGTH
        else:
            self._roster.outputs.append(StepOutput(request, token, None, "", earlier))
            return
        self._roster.end(request, outcome, now, token=token, earlier=earlier)

    # ------------------------------------------------------------------ failures and forks

    def _failed(self, request: Request, message: str, now: float, *, was_loading: bool) -> None:
        lease = request.lease
        assert lease is not None
        if lease.voided:
            self._retry(request, now)
        elif lease.load_ops:
            # The pass may know of a failed load before its acknowledgement. Only that tells the
            # cache what not to load for this request again, so the attempt lasts until then.
            self._parked[request.request_id] = None
        elif not was_loading:
            self._roster.end(request, RequestOutcome.FAILED, now, message=message)

    def _retry(self, request: Request, now: float) -> None:
        """The attempt relied on a load that failed: admit anew, a bounded number of times."""
        if request.voided_attempts < self._config.void_retries_max:
            self._roster.void(request, now)
            return
        attempts = request.voided_attempts + 1
        self._roster.end(
            request,
            RequestOutcome.FAILED,
            now,
            message=f"the cached prefix of request {request.request_id} failed to load in "
            f"{attempts} attempts, and no more are made; see storage_errors_total and "
            "copies_failed_tokens_total, or flush the host tier",
        )

    def _fork(self, leader: Request, now: float) -> None:
        """The prompt is published: its other answers fork from the leader's lease."""
        for request in self._roster.groups.prefilled(leader):
            request.attempt = Attempt.FORK
            lease = None
            if self._roster.running < self._config.max_running and leader.lease is not None:
                lease = self._cache.fork(leader.lease, request.request_id, now)
            if lease is None or isinstance(lease, Blocked):
                self._roster.queue_fork(request)
            else:
                self._roster.forked(request, lease, now)
