"""The executor of a replay: a forward pass is so many seconds of virtual time.

Owns how long a batch takes. Tokens come from the trace (`PromptKeys.output`), so that a next turn
finds its own history. Layers run one after another, and a layer that is still being loaded
holds up those after it: load-back overlaps with compute exactly as far as the port allows.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtiers.planner.machines import StepCost
from kvtiers.planner.virtual_clock import VirtualClock
from kvtiers.scheduling.executor import Batch, BatchResult, TokenResult
from kvtiers.transfer.virtual import VirtualTransfer


class VirtualExecutor:
    """Runs batches in virtual time.

    `output_of(request_id)` are all tokens of a request's answer. `next_event()` is when something
    else happens, or infinity; a run of repeated decode steps ends there, so that nobody waits for
    the whole of it. `answers_stop` says that answers may end before their limit.
    """

    def __init__(
        self,
        clock: VirtualClock,
        cost: StepCost,
        transfer: VirtualTransfer | None,
        output_of: Callable[[int], list[int]],
        next_event: Callable[[], float],
        *,
        answers_stop: bool = False,
    ) -> None:
        self.batches = 0
        self.busy_seconds = 0.0
        self.prefill_seconds = 0.0
        """Of the busy time, what steps with prompt positions in them took."""
        self.stall_seconds = 0.0
        self._clock = clock
        self._cost = cost
        self._transfer = transfer
        self._output_of = output_of
        self._next_event = next_event
        self._answers_stop = answers_stop
        # of requests that have made a token: the answer's tokens, as numbers and as results
        self._answers: dict[int, tuple[list[int], list[TokenResult]]] = {}

    def run(self, batch: Batch) -> BatchResult:
        """Let the time of the batch pass; every sampling chunk gets the trace's next token."""
        tokens = pairs = context = 0
        prefills = False
        for chunk in batch.chunks:
            start, computed = chunk.start, chunk.tokens
            tokens += computed
            pairs += computed * (2 * start + computed)
            context += start
            if computed > 1 or chunk.output_index == 0:
                prefills = True
        seconds = self._cost.seconds(tokens, pairs / 2, context)
        steps = 1
        if batch.repeat > 1:
            steps, seconds = self._repeat(batch, tokens, pairs / 2, context)
        start_time = self._clock()
        end = self._end_with_loads(batch, start_time, seconds)
        self._clock.advance_to(end)
        self.batches += steps
        self.busy_seconds += seconds
        if prefills:
            self.prefill_seconds += seconds
        stall = max(0.0, end - start_time - seconds)
        self.stall_seconds += stall

        answers = self._answers
        results: list[TokenResult | None] = []
        earlier: list[list[int]] = []
        for chunk in batch.chunks:
            if not chunk.sample:
                results.append(None)
                continue
            index = chunk.output_index
            answer = answers.get(chunk.request_id) or self._begin_answer(chunk.request_id)
            results.append(answer[1][index + steps - 1])
            if steps > 1:
                earlier.append(answer[0][index : index + steps - 1])
        return BatchResult(results, {}, stall, end - start_time, steps, earlier)

    def forget(self, request_id: int) -> None:
        """A request has ended."""
        self._answers.pop(request_id, None)

    def _begin_answer(self, request_id: int) -> tuple[list[int], list[TokenResult]]:
        tokens = self._output_of(request_id)
        made = {token: TokenResult(token) for token in set(tokens)}  # a block's are all the same
        answer = tokens, [made[token] for token in tokens]
        self._answers[request_id] = answer
        return answer

    def _repeat(self, batch: Batch, tokens: int, pairs: float, context: int) -> tuple[int, float]:
        """How many decode steps until something else happens, and how long they take together."""
        repeat = batch.repeat
        if self._answers_stop:
            answers = self._answers
            repeat = min(len(answers[c.request_id][0]) - c.output_index for c in batch.chunks)
            repeat = min(repeat, batch.repeat)
        horizon = self._next_event() - self._clock()
        seconds = self._cost.seconds
        total = 0.0
        for step in range(repeat):
            further = step * tokens
            total += seconds(tokens, pairs + further, context + further)
            if total >= horizon:
                return step + 1, total
        return repeat, total

    def _end_with_loads(self, batch: Batch, start: float, seconds: float) -> float:
        """When the last layer is through, given when each layer's pages arrive."""
        if not batch.load_ops or self._transfer is None:
            return start + seconds
        layers = self._transfer.layers
        at = start
        for layer in range(layers):
            at = max(at, self._transfer.layer_ready_at(batch.load_ops, layer)) + seconds / layers
        return at
