"""Fills one step's batch within its budgets.

Owns the budgets of one step (positions in all, positions of prefill, running requests) and the
size of chunks. Pages of every pool are the cache's to grant: `admit` is all or nothing, and what
it does not grant it does not hold. The adder must not know queues, order or results.

    |-- decode, one each --|-- prefill chunks <= max_prefill_tokens --|-- unused --|
    0                                                                              max_step_tokens

Invariants: the batch never exceeds `max_step_tokens`, its prefill part never
`max_prefill_tokens`; leases held never exceed `max_running`; a chunk that does not end its
prompt ends at a page, so that what it computed can be published, unless the budget is smaller
than a page.
"""

from __future__ import annotations

from kvtiers.core.interface import Blocked, LeaseView, PrefixCache, Refused
from kvtiers.scheduling.config import SchedulerConfig
from kvtiers.scheduling.executor import Batch, Chunk
from kvtiers.scheduling.request import Request, RequestState


class PrefillAdder:
    """One step's batch in the making."""

    def __init__(self, cache: PrefixCache, config: SchedulerConfig, running: int) -> None:
        self._cache = cache
        self._growth_tokens = config.growth_tokens
        self._page_tokens = cache.config.page_tokens
        self._max_step_tokens = config.max_step_tokens
        self._max_prefill_tokens = config.max_prefill_tokens
        self._decodes = 0
        self._step_tokens_left = config.max_step_tokens
        self._prefill_tokens_left = config.max_prefill_tokens
        self._seats_left = config.max_running - running
        self._planned: list[tuple[Request, int]] = []

    @property
    def prefill_tokens_left(self) -> int:
        """Prompt positions that still fit into this step."""
        return min(self._step_tokens_left, self._prefill_tokens_left)

    @property
    def prefill_tokens_per_step(self) -> int:
        """Prompt positions that a step with as many decoding requests computes."""
        return max(1, min(self._max_prefill_tokens, self._max_step_tokens - self._decodes))

    @property
    def can_admit(self) -> bool:
        """Whether a further request could get a seat and at least one position."""
        return self._seats_left > 0 and self.prefill_tokens_left > 0

    @property
    def planned(self) -> list[tuple[Request, int]]:
        """Requests of the batch and how many positions each computes, in order."""
        return self._planned

    def add_decodes(self, requests: list[Request]) -> None:
        """The next position of each decoding request. `max_running` fits into every step."""
        self._step_tokens_left -= len(requests)
        self._decodes += len(requests)
        self._planned += [(request, 1) for request in requests]

    def add_chunk(self, request: Request) -> int:
        """As much of a request's uncomputed prompt as fits; returns the positions (0: none)."""
        to_compute = request.tokens - request.computed_tokens
        taken = min(to_compute, self.prefill_tokens_left)
        if taken <= 0:
            return 0
        if taken < to_compute:
            beyond_page = (request.computed_tokens + taken) % self._page_tokens
            if taken > beyond_page:
                taken -= beyond_page
        self._step_tokens_left -= taken
        self._prefill_tokens_left -= taken
        self._planned.append((request, taken))
        return taken

    def admit(self, request: Request, now: float) -> LeaseView | Blocked | Refused:
        """One admission attempt.

        Slots are asked for the whole key and for the growth that the request may still need, at
        most `growth_tokens` of it.
        """
        return self._cache.admit(
            request.request_id,
            request.key,
            request.namespace,
            now,
            reserve_tokens=min(self._growth_tokens, request.final_tokens - request.tokens),
            ticket_id=request.ticket_id,
            attempt=request.attempt,
        )

    def add_admitted(self, request: Request) -> None:
        """A request that has just got its lease takes a seat, and its first chunk joins."""
        self._seats_left -= 1
        self.add_chunk(request)

    def remove(self, request: Request) -> None:
        """Take a request out again: its attempt was retracted or voided before the batch ran.

        Its positions are not given to others; such a step is rare.
        """
        self._planned = [entry for entry in self._planned if entry[0] is not request]

    def build(self, repeat: int = 1) -> Batch:
        """The packed batch, with the loads its leases wait for; see `Batch` for `repeat`."""
        chunks: list[Chunk] = []
        load_ops: list[int] = []
        for request, taken in self._planned:
            lease = request.lease
            assert lease is not None, "a planned request holds a lease"
            start = request.computed_tokens
            chunks.append(
                Chunk(
                    request.request_id,
                    lease,
                    request.sequence,
                    start,
                    taken,
                    start + taken == request.tokens,
                    request.params,
                    len(request.output),
                )
            )
            if request.state is RequestState.PREFILLING:
                load_ops += lease.load_ops  # decoding requests have none left
        return Batch(tuple(chunks), tuple(dict.fromkeys(load_ops)), repeat)
