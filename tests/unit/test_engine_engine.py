"""The engine as its clients see it: every request ends, in one of the ways it promises."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from engine_clients import (  # noqa: E402
    CONFIG,
    MODEL,
    SECONDS,
    end_of,
    make,
    request,
    running,
    tokens_of,
)

from kvtiers.engine.config import EngineConfig  # noqa: E402
from kvtiers.engine.engine import LLMEngine  # noqa: E402
from kvtiers.engine.messages import (  # noqa: E402
    Event,
    FinishEvent,
    FinishReason,
    GenerationRequest,
    TokenEvent,
)
from kvtiers.engine.models import model_directory  # noqa: E402
from kvtiers.errors import EngineBusy, InvalidRequest  # noqa: E402


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(MODEL, tmp_path_factory.mktemp("models"))


@pytest.fixture
def config() -> EngineConfig:
    return CONFIG


@pytest.fixture
def engine(directory: Path, config: EngineConfig) -> Iterator[LLMEngine]:
    engine = make(directory, config)
    engine.start()
    yield engine
    engine.stop()


# ---------------------------------------------------------------- answers


def test_an_answer_is_its_events_and_one_end(engine: LLMEngine) -> None:
    events = list(engine.submit(request()))
    assert [type(e) for e in events] == [TokenEvent] * 8 + [FinishEvent]
    end = events[-1]
    assert (end.reason, end.output_tokens) == (FinishReason.LENGTH, 8)
    assert end.split is not None
    assert end.split.prompt == 40
    text = engine.codec.decode([e.token for e in events[:-1]])
    assert "".join(e.text for e in events) == text


def test_a_second_request_for_the_same_prompt_hits(engine: LLMEngine) -> None:
    first, second = end_of(engine, request()), end_of(engine, request())
    assert first.split is not None
    assert first.split.computed == 40
    assert second.split is not None
    assert second.split.device_hit == 32
    assert first.text == second.text


def test_a_stop_string_ends_the_answer_before_it(engine: LLMEngine) -> None:
    whole = end_of(engine, request(max_tokens=60)).text
    stop = next(whole[i : i + 2] for i in range(10, len(whole) - 2) if "�" not in whole[i : i + 2])
    end = end_of(engine, request(max_tokens=60, stop=(stop,)))
    assert (end.reason, end.stop) == (FinishReason.STOP, stop)
    assert end.text == whole[: whole.index(stop)]
    assert end.output_tokens < 60


def test_a_stop_token_ends_the_answer_and_is_no_part_of_it(engine: LLMEngine) -> None:
    tokens = tokens_of(engine, request())
    end = end_of(engine, request(stop_token_ids=(tokens[4],)))
    assert (end.reason, end.stop) == (FinishReason.STOP, tokens[4])
    count = tokens.index(tokens[4]) + 1
    assert end.output_tokens == count
    assert end.text == engine.codec.decode(tokens[: count - 1])


def test_what_if_is_asked_once_for_n_answers_and_not_for_what_is_refused(
    directory: Path, config: EngineConfig
) -> None:
    engine = make(directory, replace(config, device_pages=32))
    engine.start()
    asked: list[bytes] = []
    what_if = engine.parts.what_if
    ask = what_if.ask
    what_if.ask = lambda key, namespace: (asked.append(key), ask(key, namespace))[1]  # type: ignore[method-assign]
    end_of(engine, replace(request(), n=3))
    assert len(asked) == 1
    assert end_of(engine, request(max_tokens=2000)).reason is FinishReason.REFUSED
    assert len(asked) == 1
    engine.stop()


def test_n_answers_share_a_prefill_and_differ_by_seed(engine: LLMEngine) -> None:
    wanted = replace(request(temperature=1.0, seed=3, max_tokens=12), n=3)
    first, again = (engine.submit(wanted).results(SECONDS) for _ in range(2))
    assert len({end.text for end in first}) == 3
    assert [end.text for end in first] == [end.text for end in again]
    splits = [end.split for end in first]
    assert sum(split.computed for split in splits if split) < 2 * 40


def test_answers_without_a_seed_differ(engine: LLMEngine) -> None:
    wanted = request(temperature=1.0, max_tokens=12)
    assert tokens_of(engine, wanted) != tokens_of(engine, wanted)


def test_logprobs_come_with_the_tokens(engine: LLMEngine) -> None:
    events = list(engine.submit(request(logprobs=3)))[:-1]
    for event in events:
        assert isinstance(event, TokenEvent)
        assert event.logprob == event.top_logprobs[0][1]
        assert len(event.top_logprobs) == 3


def test_captured_logits_are_fetched_once(directory: Path, config: EngineConfig) -> None:
    engine = make(directory, replace(config, capture_logits_mib=16))
    engine.start()
    handle = engine.submit(replace(request(), capture_logits=True))
    tokens = [e.token for e in handle if isinstance(e, TokenEvent)]
    logits = engine.take_logits(handle.request_id)
    assert logits is not None
    assert logits.shape == (8, engine.codec.vocab_tokens)
    assert logits.argmax(-1).tolist() == tokens
    assert engine.take_logits(handle.request_id) is None
    engine.stop()


def test_two_salts_never_share_a_page(engine: LLMEngine) -> None:
    end_of(engine, replace(request(), cache_salt="a"))
    other = end_of(engine, replace(request(), cache_salt="b"))
    same = end_of(engine, replace(request(), cache_salt="a"))
    assert other.split is not None
    assert other.split.computed == 40
    assert same.split is not None
    assert same.split.device_hit == 32


def test_many_at_once_all_end_and_the_books_balance(engine: LLMEngine) -> None:
    handles = [engine.submit(request(seed % 7, 20 + seed, max_tokens=5)) for seed in range(40)]
    for number, handle in enumerate(handles):
        if number % 5 == 0:
            engine.cancel(handle.request_id)
    reasons = {handle.results(SECONDS)[0].reason for handle in handles}
    assert reasons <= {FinishReason.LENGTH, FinishReason.CANCELLED}
    assert engine.drain(SECONDS)

    def check(parts: Any) -> dict[str, int]:
        assert parts.ledger.audit(parts.cache.recount()) == {}
        parts.ledger.check()
        return parts.ledger.open_ends()

    assert not any(engine.call_in_loop(check).result().values())


# ---------------------------------------------------------------- requests that cannot be


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (GenerationRequest(np.array([], np.int32)), "prompt is empty"),
        (request(tokens=2050), "context is 2048 tokens"),
        (request(tokens=2040, max_tokens=9), "max_tokens asks for 9 more"),
        (request(max_tokens=0), "max_tokens is 0"),
        (replace(request(), n=0), "n is 0"),
        (GenerationRequest(np.array([263], np.int32)), "outside this model's vocabulary"),
        (request(temperature=-1.0), "temperature is -1"),
        (request(top_p=0.0), "top_p 0"),
        (replace(request(), capture_logits=True), "capture_logits_mib"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(
    engine: LLMEngine, wanted: GenerationRequest, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        engine.submit(wanted)
    assert end_of(engine, request()).reason is FinishReason.LENGTH


def test_negative_tokens_are_refused(engine: LLMEngine) -> None:
    with pytest.raises(ValueError, match="tokens lie in"):
        engine.submit(GenerationRequest(np.array([-1], np.int32)))


def test_a_request_larger_than_the_device_is_refused_and_others_go_on(
    directory: Path, config: EngineConfig
) -> None:
    engine = make(directory, replace(config, device_pages=4))
    engine.start()
    end = end_of(engine, request(tokens=100))
    assert end.reason is FinishReason.REFUSED
    assert "device holds 4 pages" in end.message
    assert end_of(engine, request(tokens=20)).reason is FinishReason.LENGTH
    engine.stop()


def test_a_full_queue_turns_requests_away(directory: Path, config: EngineConfig) -> None:
    engine = make(directory, replace(config, max_waiting_requests=2, max_running_requests=1))
    engine.start()
    handles, turned_away = [], []
    for seed in range(10):
        try:
            handles.append(engine.submit(request(seed, max_tokens=100)))
        except EngineBusy as error:
            turned_away.append(str(error))
    assert turned_away
    assert "no more than 2 may (--max-waiting-requests)" in turned_away[0]
    for handle in handles:
        assert handle.results(SECONDS)[0].reason is FinishReason.LENGTH
    engine.stop()


# ---------------------------------------------------------------- ends before the end


def test_a_cancelled_request_ends_and_gives_everything_back(engine: LLMEngine) -> None:
    handle = engine.submit(running(engine))
    events = iter(handle)
    assert isinstance(next(events), TokenEvent)
    engine.cancel(handle.request_id)
    end = list(events)[-1]
    assert isinstance(end, FinishEvent)
    assert end.reason is FinishReason.CANCELLED
    assert engine.call_in_loop(lambda p: p.ledger.open_ends()["leases"]).result() == 0


def test_cancelling_what_has_ended_or_never_was_is_harmless(engine: LLMEngine) -> None:
    handle = engine.submit(request())
    handle.results(SECONDS)
    engine.cancel(handle.request_id)
    engine.cancel(999_999)
    assert end_of(engine, request()).reason is FinishReason.LENGTH


def test_a_deadline_ends_a_request_with_what_there_is(engine: LLMEngine) -> None:
    end = end_of(engine, replace(running(engine), timeout_seconds=0.2))
    assert end.reason is FinishReason.DEADLINE


def test_a_forward_that_fails_ends_its_request_as_failed_and_no_other(engine: LLMEngine) -> None:
    poison = 5
    with torch.no_grad():
        engine.parts.model.model.model.embed_tokens.weight[poison] = float("nan")
    bad = engine.submit(GenerationRequest(np.full(20, poison, np.int32), request().params))
    good = engine.submit(request())
    end = bad.results(SECONDS)[0]
    assert end.reason is FinishReason.FAILED
    assert "NaN" in end.message
    assert good.results(SECONDS)[0].reason is FinishReason.LENGTH
    assert engine.ready


def test_nothing_of_a_failed_forward_is_found_again(engine: LLMEngine) -> None:
    weight = engine.parts.model.model.model.embed_tokens.weight
    kept = weight[5].clone()
    bad = GenerationRequest(np.full(40, 5, np.int32), request().params)
    with torch.no_grad():
        weight[5] = float("nan")
    assert end_of(engine, bad).reason is FinishReason.FAILED
    with torch.no_grad():
        weight[5] = kept
    end = end_of(engine, bad)
    assert end.reason is FinishReason.LENGTH
    assert end.split is not None
    assert end.split.computed == 40


def test_a_callback_that_raises_harms_nobody(engine: LLMEngine) -> None:
    def broken(event: Event) -> None:
        raise RuntimeError("client bug")

    engine.submit(request(), broken)
    assert end_of(engine, request(2)).reason is FinishReason.LENGTH


def test_events_come_on_the_engines_thread_and_in_order(engine: LLMEngine) -> None:
    seen: list[Event] = []
    threads: set[str] = set()
    done = threading.Event()

    def on_event(event: Event) -> None:
        seen.append(event)
        threads.add(threading.current_thread().name)
        if isinstance(event, FinishEvent):
            done.set()

    engine.submit(request(), on_event)
    assert done.wait(SECONDS)
    assert threads == {"kvtiers-engine"}
    assert [type(e) for e in seen] == [TokenEvent] * 8 + [FinishEvent]


def test_the_time_around_the_forward_passes_is_known(engine: LLMEngine) -> None:
    end_of(engine, request())
    assert engine.step_seconds >= engine.parts.executor.busy_seconds > 0
