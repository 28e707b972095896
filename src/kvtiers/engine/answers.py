"""The answers in progress: from the scheduler's step outputs to events for clients.

Owns, per answer, its detokenizer, its stop strings and its client's callback, and the promise that
every answer gets exactly one `FinishEvent`. One thread calls it, the engine's. Must not know how
tokens are computed; that an answer met its stop string is reported to `stop_request`, because only
this module sees text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvtiers.engine.detokenizer import Detokenizer
from kvtiers.engine.messages import (
    Event,
    FinishEvent,
    FinishReason,
    GenerationRequest,
    TokenEvent,
)
from kvtiers.scheduling.executor import TokenResult
from kvtiers.scheduling.request import Request
from kvtiers.scheduling.roster import StepOutput

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Answer:
    """Answer `index` of the engine's request `request_id`; `sequence` is the scheduler's."""

    request_id: int
    index: int
    sequence: Request
    detokenizer: Detokenizer
    on_event: Callable[[Event], None]


class Answers:
    """Live answers by the id of their scheduler request."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop_request: Callable[[int], object],
        ended: Callable[[Request], object] = lambda sequence: None,
    ) -> None:
        """`ended` is told of every answer's scheduler request after its client."""
        self._decode = decode
        self._stop_request = stop_request
        self._ended = ended
        self._live: dict[int, _Answer] = {}

    def __len__(self) -> int:
        return len(self._live)

    def ids(self, request_id: int | None = None) -> list[int]:
        """Scheduler ids of the live answers of one request, or of all."""
        return [
            sequence_id
            for sequence_id, answer in self._live.items()
            if request_id is None or answer.request_id == request_id
        ]

    def begin(
        self,
        request_id: int,
        request: GenerationRequest,
        sequences: Iterable[Request],
        on_event: Callable[[Event], None],
    ) -> None:
        """Follow the scheduler requests that make the `n` answers of `request`."""
        for index, sequence in enumerate(sequences):
            detokenizer = Detokenizer(self._decode, request.params.stop)
            answer = _Answer(request_id, index, sequence, detokenizer, on_event)
            self._live[sequence.request_id] = answer

    def deliver(self, outputs: Iterable[StepOutput]) -> None:
        """Turn what a step did into events."""
        for output in outputs:
            answer = self._live.get(output.request.request_id)
            if answer is None:
                continue  # it met its stop string earlier in this step
            if output.token is not None:
                self._token(answer, output.token, output.outcome)
            if output.outcome is not None and not answer.detokenizer.stopped_by:
                self._finish(answer, output.outcome, message=output.message)

    def end(self, sequence_id: int, reason: FinishReason, message: str = "") -> None:
        """End an answer that the scheduler no longer speaks of; ended ones are left alone."""
        answer = self._live.get(sequence_id)
        if answer is not None:
            self._finish(answer, reason, message=message)

    def _token(self, answer: _Answer, token: TokenResult, outcome: FinishReason | None) -> None:
        detokenizer = answer.detokenizer
        # The token that ended a text is counted, but is not part of it.
        ends_text = outcome is FinishReason.STOP
        text = "" if ends_text else detokenizer.push(token.token)
        event = TokenEvent(answer.index, token.token, text, token.logprob, token.top_logprobs)
        _tell(answer, event)
        if detokenizer.stopped_by is not None:
            if outcome is None:
                self._stop_request(answer.sequence.request_id)
            self._finish(answer, FinishReason.STOP, stop=detokenizer.stopped_by)

    def _finish(
        self,
        answer: _Answer,
        reason: FinishReason,
        *,
        stop: str | int | None = None,
        message: str = "",
    ) -> None:
        sequence = answer.sequence
        del self._live[sequence.request_id]
        _tell(answer, _end_of(answer, reason, stop, message))
        try:
            self._ended(sequence)
        except Exception:  # what is done with an answer that has ended is no client's business
            log.exception("request %d has ended, and who is told of it raised", sequence.request_id)


def _end_of(
    answer: _Answer, reason: FinishReason, stop: str | int | None, message: str
) -> FinishEvent:
    """The last event of an answer, which has one even if its text cannot be made."""
    sequence = answer.sequence
    text = ""
    try:
        text = answer.detokenizer.finish()
        if reason is FinishReason.LENGTH and answer.detokenizer.stopped_by is not None:
            # It was whole, and held back with a character that was not.
            reason, stop = FinishReason.STOP, answer.detokenizer.stopped_by
    except Exception as error:
        log.exception("the end of request %d is no text", sequence.request_id)
        reason, stop = FinishReason.FAILED, None
        message = (
            message or f"the answer could not be made into text: {type(error).__name__}: {error}"
        )
    if reason is FinishReason.STOP and stop is None:
        last = sequence.output[-1] if sequence.output else None
        stop = last if last in sequence.params.stop_token_ids else None
    return FinishEvent(
        index=answer.index,
        reason=reason,
        output_tokens=len(sequence.output),
        text=text,
        stop=stop,
        split=sequence.split,
        message=message,
    )


def _tell(answer: _Answer, event: Event) -> None:
    try:
        answer.on_event(event)
    except Exception:  # a client's callback must not take the other answers down
        log.exception("the callback of request %d raised", answer.sequence.request_id)
