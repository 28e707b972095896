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

from kvtiers.engine.codec import TokenizerCodec  # noqa: E402
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
from kvtiers.engine.parts import assemble  # noqa: E402
from kvtiers.engine.served_model import ServedModel, load_plain  # noqa: E402
from kvtiers.errors import ConfigError, EngineBusy, InvalidRequest, StorageError  # noqa: E402
from kvtiers.scheduling.executor import SamplingParams  # noqa: E402
from kvtiers.types import StoreOn, Tier, WritePolicy  # noqa: E402

MODEL = "tiny-random-llama"
SECONDS = 60.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(MODEL, tmp_path_factory.mktemp("models"))


@pytest.fixture
def config() -> EngineConfig:
    return EngineConfig(model=MODEL, device_pages=128, host_pages=128, prefetch_threshold_tokens=16)


def make(directory: Path, config: EngineConfig) -> LLMEngine:
    """An engine with a model of its own, so that a test may break it."""
    served = ServedModel.of(load_plain(directory, config.dtype))
    codec = TokenizerCodec(directory, served.model.config.vocab_size)
    return LLMEngine(config, MODEL, codec, assemble(config, served, codec.eos_token_ids))


@pytest.fixture
def engine(directory: Path, config: EngineConfig) -> Iterator[LLMEngine]:
    engine = make(directory, config)
    engine.start()
    yield engine
    engine.stop()


def prompt(seed: int, tokens: int = 40) -> np.ndarray:
    return np.random.default_rng(seed).integers(7, 263, tokens).astype(np.int32)


def request(content: int = 1, tokens: int = 40, **params: Any) -> GenerationRequest:
    given = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **params}
    return GenerationRequest(prompt(content, tokens), SamplingParams(**given))


def tokens_of(engine: LLMEngine, wanted: GenerationRequest) -> list[int]:
    return [e.token for e in engine.submit(wanted) if isinstance(e, TokenEvent)]


def end_of(engine: LLMEngine, wanted: GenerationRequest) -> FinishEvent:
    return engine.submit(wanted).results(SECONDS)[0]


def running(engine: LLMEngine) -> GenerationRequest:
    return request(tokens=20, max_tokens=1500)


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
    assert "max_waiting_requests=2" in turned_away[0]
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


# ---------------------------------------------------------------- commands


def test_what_a_command_raises_is_raised_where_it_was_called(engine: LLMEngine) -> None:
    def fail(parts: Any) -> None:
        raise LookupError("nothing there")

    with pytest.raises(LookupError, match="nothing there"):
        engine.call_in_loop(fail).result()
    assert end_of(engine, request()).reason is FinishReason.LENGTH


def test_commands_run_between_the_steps_of_a_running_request(engine: LLMEngine) -> None:
    handle = engine.submit(running(engine))
    names = {
        engine.call_in_loop(lambda _: threading.current_thread().name).result() for _ in range(5)
    }
    assert names == {"kvtiers-engine"}
    engine.cancel(handle.request_id)
    handle.results(SECONDS)


def test_a_pinned_prefix_survives_a_flush_and_an_unpinned_one_does_not(engine: LLMEngine) -> None:
    end_of(engine, request())
    pin = engine.pin(prompt(1), "", 60.0)
    assert pin is not None
    engine.flush(Tier.DEVICE)
    kept = end_of(engine, request()).split
    assert kept is not None
    assert kept.device_hit == 32
    engine.unpin(pin)
    engine.flush(Tier.DEVICE)
    engine.flush(Tier.HOST)
    gone = end_of(engine, request()).split
    assert gone is not None
    assert gone.computed == 40


def test_a_pin_of_nothing_is_none(engine: LLMEngine) -> None:
    assert engine.pin(prompt(99), "", 60.0) is None


def test_storage_is_detached_and_attached_while_requests_go_on(
    directory: Path, config: EngineConfig, tmp_path: Path
) -> None:
    engine = make(directory, replace(config, storage_dir=tmp_path / "s", storage_gib=0.05))
    engine.start()
    end_of(engine, request())
    engine.call_in_loop(lambda p: p.controller.drain(SECONDS)).result()
    engine.detach_storage()
    assert engine.call_in_loop(lambda p: p.store_name).result() is None
    assert end_of(engine, request(2)).reason is FinishReason.LENGTH
    engine.attach_storage()
    with pytest.raises(StorageError, match="attached already"):
        engine.attach_storage()
    for tier in (Tier.DEVICE, Tier.HOST):
        engine.flush(tier)
    split = end_of(engine, request()).split
    assert split is not None
    assert split.storage_hit == 32
    for tier in (Tier.DEVICE, Tier.HOST):
        engine.flush(tier)
    assert engine.flush(Tier.STORAGE) >= 2
    engine.stop()


def test_attaching_storage_that_was_never_configured_says_how(engine: LLMEngine) -> None:
    with pytest.raises(ConfigError, match="--storage DIR"):
        engine.attach_storage()
    assert end_of(engine, request()).reason is FinishReason.LENGTH


# ---------------------------------------------------------------- beginning and end


def test_before_start_and_after_stop_nothing_is_taken(
    directory: Path, config: EngineConfig
) -> None:
    engine = make(directory, config)
    assert not engine.ready
    with pytest.raises(EngineBusy, match="not running"):
        engine.submit(request())
    assert engine.call_in_loop(lambda p: p.running_requests).result() == 0
    engine.start()
    assert engine.ready
    engine.stop()
    assert not engine.ready
    with pytest.raises(EngineBusy, match="not running"):
        engine.submit(request())
    engine.stop()


def test_stopping_ends_what_runs_as_cancelled(directory: Path, config: EngineConfig) -> None:
    engine = make(directory, config)
    engine.start()
    handles = [engine.submit(running(engine)) for _ in range(3)]
    next(iter(handles[0]))
    engine.stop()
    for handle in handles:
        assert handle.results(SECONDS)[0].reason is FinishReason.CANCELLED


def test_draining_finishes_what_runs_and_takes_nothing_new(engine: LLMEngine) -> None:
    handle = engine.submit(request(max_tokens=100))
    assert engine.drain(SECONDS)
    assert handle.results(0.0)[0].reason is FinishReason.LENGTH
    assert not engine.ready
    with pytest.raises(EngineBusy, match="draining"):
        engine.submit(request())


def test_a_drain_that_runs_out_of_time_cancels_the_rest(engine: LLMEngine) -> None:
    handle = engine.submit(running(engine))
    next(iter(handle))
    assert not engine.drain(0.05)
    assert handle.results(SECONDS)[0].reason is FinishReason.CANCELLED


def test_a_loop_that_dies_fails_every_request_and_says_why(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = engine.submit(running(engine))
    next(iter(handle))

    def broken() -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(engine.parts.scheduler, "step", broken)
    end = handle.results(SECONDS)[0]
    assert end.reason is FinishReason.FAILED
    assert "AssertionError: a bug" in end.message
    assert not engine.ready
    with pytest.raises(EngineBusy):
        engine.submit(request())


@pytest.mark.parametrize(
    "policy",
    [
        {"write_policy": "write_through"},
        {"write_policy": "write_back"},
        {"write_policy": "write_back", "retention": "exclusive", "store_on": "evict"},
        {"write_policy": "write_through", "store_on": "evict"},
    ],
    ids=lambda p: "-".join(p.values()),
)
def test_a_restart_on_the_same_storage_is_warm(
    directory: Path, config: EngineConfig, tmp_path: Path, policy: dict[str, str]
) -> None:
    config = replace(config, storage_dir=tmp_path / "s", storage_gib=0.05, **policy)
    texts = []
    for hits in (0, 32):
        engine = make(directory, config)
        engine.start()
        end = end_of(engine, request())
        assert end.split is not None
        assert end.split.storage_hit == hits
        texts.append(end.text)
        assert engine.drain(SECONDS)
        engine.stop()
    assert texts[0] == texts[1]


def test_another_model_on_the_same_storage_hits_nothing(
    directory: Path, config: EngineConfig, tmp_path: Path
) -> None:
    config = replace(config, storage_dir=tmp_path / "s", storage_gib=0.05)
    for changed in (False, True):
        served_from = load_plain(directory, "float32")
        if changed:
            with torch.no_grad():
                served_from.model.layers[0].mlp.up_proj.weight[0, 0] += 1e-3
        served = ServedModel.of(served_from)
        codec = TokenizerCodec(directory, served.model.config.vocab_size)
        engine = LLMEngine(config, MODEL, codec, assemble(config, served, codec.eos_token_ids))
        engine.start()
        end = end_of(engine, request())
        assert end.split is not None
        assert end.split.computed == 40
        engine.drain(SECONDS)
        engine.stop()


# ---------------------------------------------------------------- settings


def test_contradictions_are_reported_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(dtype="int4", page_tokens=0, host_gib=-1)
    message = str(caught.value)
    assert "int4" in message
    assert "page_tokens" in message
    assert "host_gib" in message


def test_policies_may_be_given_by_name_and_unknown_ones_list_the_known() -> None:
    config = EngineConfig(write_policy="write_back", store_on="evict")  # type: ignore[arg-type]
    assert config.write_policy is WritePolicy.WRITE_BACK
    assert config.store_on is StoreOn.EVICT
    with pytest.raises(ConfigError, match="known: inclusive, exclusive"):
        EngineConfig(retention="both")  # type: ignore[arg-type]


def test_a_batch_must_have_room_for_prefill_beside_decode() -> None:
    with pytest.raises(ConfigError, match="raise max_batch_tokens"):
        EngineConfig(max_running_requests=64, max_batch_tokens=64)


def test_tiers_given_in_gib_become_pages() -> None:
    config = EngineConfig(device_gib=1.0, host_gib=2.0)
    assert config.tier_pages(1 << 20) == (1024, 2048)


def test_a_device_too_small_for_a_page_says_so() -> None:
    with pytest.raises(ConfigError, match="holds no page"):
        EngineConfig(device_gib=0.0001).tier_pages(1 << 20)
