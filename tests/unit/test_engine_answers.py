"""Every answer has exactly one end, whatever raises on the way to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kvtiers.engine.answers import Answers
from kvtiers.engine.messages import Event, FinishEvent, FinishReason, GenerationRequest, TokenEvent
from kvtiers.scheduling.executor import SamplingParams, TokenResult
from kvtiers.scheduling.request import Request
from kvtiers.scheduling.roster import StepOutput
from kvtiers.types import Namespace, token_key

PROMPT = np.arange(4, dtype=np.int32)


def nothing(request_id: int) -> None:
    pass


def sequence(request_id: int) -> Request:
    return Request(request_id, token_key(PROMPT), SamplingParams(), Namespace("model"), 0.0)


def follow(answers: Answers, sequence: Request, on_event: Callable[[Event], None]) -> None:
    answers.begin(sequence.request_id, GenerationRequest(PROMPT), [sequence], on_event)


def letters(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


def test_an_answer_whose_end_is_no_text_has_failed_and_says_why() -> None:
    def decode(tokens: Sequence[int]) -> str:
        raise ValueError("not these tokens")

    events: list[Event] = []
    answers = Answers(decode, nothing)
    follow(answers, sequence(1), events.append)
    answers.deliver([StepOutput(sequence(1), outcome=FinishReason.LENGTH)])
    (end,) = events
    assert isinstance(end, FinishEvent)
    assert end.reason is FinishReason.FAILED
    assert "ValueError: not these tokens" in end.message
    assert answers.ids() == []


def test_what_fails_with_an_answer_that_has_ended_is_not_its_clients_business(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[str] = []

    def ended(sequence: Request) -> None:
        told.append("the rest")
        raise ValueError("a bug in what is done with it")

    answers = Answers(letters, nothing, ended)
    for request_id in (1, 2):
        follow(answers, sequence(request_id), lambda event: told.append("the client"))
        answers.end(request_id, FinishReason.CANCELLED)
    assert told == ["the client", "the rest"] * 2
    assert "a bug in what is done with it" in caplog.text


def test_a_callback_that_raises_takes_no_other_answer_down() -> None:
    def raises(event: Event) -> None:
        raise ValueError("a client's bug")

    events: list[Event] = []
    answers = Answers(letters, nothing)
    follow(answers, sequence(1), raises)
    follow(answers, sequence(2), events.append)
    answers.deliver(
        StepOutput(sequence(request_id), TokenResult(ord("a")), FinishReason.LENGTH)
        for request_id in (1, 2)
    )
    assert [type(event) for event in events] == [TokenEvent, FinishEvent]
    assert len(answers) == 0


def test_a_stop_string_behind_an_unfinished_character_is_what_ended_the_answer() -> None:
    """It was whole already, and held back because a later token could have changed the text."""

    def decode(tokens: Sequence[int]) -> str:
        return "".join({1: "a", 2: "b \ufffd"}[token] for token in tokens)

    events: list[Event] = []
    answers = Answers(decode, nothing)
    params = SamplingParams(max_tokens=2, stop=(" ",))
    asked = Request(1, token_key(PROMPT), params, Namespace("model"), 0.0)
    answers.begin(1, GenerationRequest(PROMPT, params), [asked], events.append)
    answers.deliver([StepOutput(asked, TokenResult(1))])
    answers.deliver([StepOutput(asked, TokenResult(2), FinishReason.LENGTH)])
    end = events[-1]
    assert isinstance(end, FinishEvent)
    assert (end.reason, end.stop, end.text) == (FinishReason.STOP, " ", "b")
