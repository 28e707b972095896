"""An engine that has met a bug: everybody is told, nothing waits, and what is left is released."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from engine_clients import CONFIG, MODEL, SECONDS, make, request, running

from kvtiers.engine.engine import LLMEngine
from kvtiers.engine.messages import FinishReason
from kvtiers.engine.models import model_directory
from kvtiers.errors import EngineBusy, InvariantViolation, UnknownOperation
from kvtiers.storage.file import FileStore


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(MODEL, tmp_path_factory.mktemp("models"))


@pytest.fixture
def engine(directory: Path, tmp_path: Path) -> Iterator[LLMEngine]:
    engine = make(directory, replace(CONFIG, storage_dir=tmp_path / "s", storage_gib=0.05))
    engine.start()
    yield engine
    engine.stop()


def raising(error: BaseException) -> Any:
    def raises(*_: object) -> None:
        raise error

    return raises


def test_a_cancel_beside_a_broken_scheduler_keeps_no_one_waiting(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    handles = [engine.submit(running(engine)) for _ in range(2)]
    in_step, posted = threading.Event(), threading.Event()

    def broken() -> None:
        in_step.set()
        assert posted.wait(SECONDS)
        raise AssertionError("a bug")

    monkeypatch.setattr(engine.parts.scheduler, "step", broken)
    monkeypatch.setattr(engine.parts.scheduler, "cancel", raising(KeyError("broken by the bug")))
    assert in_step.wait(SECONDS)
    engine.cancel(handles[0].request_id)
    later = engine.call_in_loop(lambda parts: parts.store_name)
    posted.set()
    for handle in handles:
        assert handle.results(SECONDS)[0].reason is FinishReason.FAILED
    assert later.result(SECONDS) == "file"
    assert not engine.drain(SECONDS)
    engine.stop()
    FileStore(tmp_path / "s", engine.parts.pools.spec.bytes_per_slot).close()  # it is free again


def test_a_violated_invariant_is_told_to_who_met_it_and_ends_the_engine(engine: LLMEngine) -> None:
    handle = engine.submit(running(engine))
    met = engine.call_in_loop(raising(InvariantViolation("the books do not balance")))
    with pytest.raises(InvariantViolation, match="do not balance"):
        met.result(SECONDS)
    end = handle.results(SECONDS)[0]
    assert end.reason is FinishReason.FAILED
    assert "the books do not balance" in end.message
    assert not engine.ready
    with pytest.raises(EngineBusy):
        engine.submit(request())


def test_a_bug_met_while_the_books_are_brought_up_to_date_is_no_command_s_own(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = engine.submit(running(engine))

    def break_the_controller(parts: Any) -> None:
        monkeypatch.setattr(parts.controller, "pump", raising(UnknownOperation("copy 7")))

    told = engine.call_in_loop(break_the_controller)
    with pytest.raises(UnknownOperation):
        told.result(SECONDS)
    assert handle.results(SECONDS)[0].reason is FinishReason.FAILED
    assert engine.call_in_loop(lambda parts: parts.store_name).result(SECONDS) == "file"
    assert not engine.drain(SECONDS)


def test_a_bug_met_while_draining_ends_the_drain(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        type(engine.parts), "save", raising(InvariantViolation("found while saving"))
    )
    assert not engine.drain(SECONDS)
    assert not engine.ready
