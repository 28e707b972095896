"""Commands to a running engine, its beginning and its end, and its settings."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from engine_clients import (  # noqa: E402
    CONFIG,
    MODEL,
    SECONDS,
    end_of,
    make,
    prompt,
    request,
    running,
)

from kvtiers.engine.codec import TokenizerCodec  # noqa: E402
from kvtiers.engine.config import EngineConfig  # noqa: E402
from kvtiers.engine.engine import LLMEngine  # noqa: E402
from kvtiers.engine.messages import FinishReason  # noqa: E402
from kvtiers.engine.models import model_directory  # noqa: E402
from kvtiers.engine.parts import EngineParts, assemble  # noqa: E402
from kvtiers.engine.served_model import ServedModel, load_plain  # noqa: E402
from kvtiers.errors import ConfigError, EngineBusy, ModelError, StorageError  # noqa: E402
from kvtiers.types import StoreOn, Tier, WritePolicy  # noqa: E402


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


def test_pages_that_cannot_be_saved_before_the_exit_are_told(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(EngineParts, "save", lambda parts, seconds: False)
    assert engine.drain(SECONDS)  # every answer was finished all the same
    assert "lost at exit" in caplog.text
    assert "--drain-seconds" in caplog.text


# ---------------------------------------------------------------- settings


def test_contradictions_are_reported_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(dtype="int4", page_tokens=0, host_gib=-1)
    message = str(caught.value)
    assert "int4" in message
    assert "--page-tokens" in message
    assert "--host-gib" in message


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("device_gib", math.nan),
        ("host_gib", math.inf),
        ("storage_gib", math.nan),
        ("device_pages", 0),
        ("host_pages", -3),
        ("context_tokens", 1),
        ("max_waiting_requests", 0),
        ("prefetch_threshold_tokens", -1),
    ],
)
def test_a_size_that_is_none_is_named_with_its_limit(setting: str, value: float) -> None:
    flag = "--" + setting.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} is {value}; it must be"):
        EngineConfig(**{setting: value})  # type: ignore[arg-type]


def test_tiers_larger_than_the_machine_are_refused_before_they_are_taken(directory: Path) -> None:
    served = ServedModel.of(load_plain(directory, "float32"))
    config = replace(CONFIG, device_pages=None, host_pages=None, device_gib=1.0, host_gib=1e6)
    with pytest.raises(ConfigError, match="available here"):
        assemble(config, served, ())


def test_a_path_without_a_model_is_not_taken_for_a_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a directory"):
        model_directory(str(tmp_path / "nothing"), tmp_path)


def test_policies_may_be_given_by_name_and_unknown_ones_list_the_known() -> None:
    config = EngineConfig(write_policy="write_back", store_on="evict")  # type: ignore[arg-type]
    assert config.write_policy is WritePolicy.WRITE_BACK
    assert config.store_on is StoreOn.EVICT
    with pytest.raises(ConfigError, match="known: inclusive, exclusive"):
        EngineConfig(retention="both")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_threads": 100_000}, "--num-threads is 100000; it must be at most 512"),
        ({"eviction": "fifo"}, "--eviction is 'fifo'; known: lru, lfu"),
        ({"schedule_policy": "random"}, "--schedule-policy is 'random'; known: fcfs"),
        ({"storage_gib": 1.0}, "--storage-gib 1 without --storage"),
        ({"storage_dir": Path("kv"), "host_gib": 0.0}, "--host-gib is 0 and .*--storage.* passes"),
        ({"storage_dir": Path("kv"), "host_pages": 0}, "raise --host-pages"),
    ],
)
def test_what_could_not_work_is_told_before_a_model_is_loaded(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**settings)


def test_a_host_tier_smaller_than_a_page_is_none_for_storage() -> None:
    config = EngineConfig(storage_dir=Path("kv"), host_gib=1e-9)
    with pytest.raises(ConfigError, match="--host-gib 1e-09 holds no page"):
        config.tier_pages(16_384)


def test_a_batch_must_have_room_for_prefill_beside_decode() -> None:
    with pytest.raises(ConfigError, match="raise --max-batch-tokens"):
        EngineConfig(max_running_requests=64, max_batch_tokens=64)


def test_tiers_given_in_gib_become_pages() -> None:
    config = EngineConfig(device_gib=1.0, host_gib=2.0)
    assert config.tier_pages(1 << 20) == (1024, 2048)


def test_a_device_too_small_for_a_page_says_so() -> None:
    with pytest.raises(ConfigError, match="holds no page"):
        EngineConfig(device_gib=0.0001).tier_pages(1 << 20)
