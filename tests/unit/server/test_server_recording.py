"""What of a server's requests becomes a record, and what of a recording that cannot go on."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs kvtiers[serve]")

from fake_engine import FakeEngine
from fastapi.testclient import TestClient

from kvtiers.engine.config import EngineConfig
from kvtiers.engine.messages import Event, FinishEvent, FinishReason, GenerationRequest
from kvtiers.errors import ConfigError
from kvtiers.scheduling.executor import SamplingParams
from kvtiers.server.app import create_app
from kvtiers.server.context import ServerContext
from kvtiers.server.launch import launch
from kvtiers.server.recording import Recording
from kvtiers.server.settings import ServerSettings
from kvtiers.workload import (
    Measured,
    RecordedTraceWriter,
    TraceRequest,
    open_trace,
)

PROMPT = "twenty bytes of text"
BODY = {"model": "fake", "prompt": PROMPT, "max_tokens": 3}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "live.jsonl"


@contextmanager
def _recorded(path: Path, engine: FakeEngine, **options: bool) -> Iterator[TestClient]:
    recording = Recording.to_file(path, block_tokens=16, **options)
    with _client(engine, recording) as client:
        yield client
    recording.close()


def _client(engine: FakeEngine, recording: Recording) -> TestClient:
    context = ServerContext.of(engine, ServerSettings(), lambda: b"", recording)  # type: ignore[arg-type]
    return TestClient(create_app(context), raise_server_exceptions=False)


def _requests(path: Path) -> list[TraceRequest]:
    return list(open_trace(path))


def _until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up, "it did not happen in time"
        time.sleep(0.01)


def test_a_record_has_lengths_ids_and_what_was_measured(path: Path) -> None:
    with _recorded(path, FakeEngine()) as client:
        client.post("/v1/completions", json={**BODY, "max_tokens": 15}).raise_for_status()
    (request,) = _requests(path)
    assert (request.arrival_seconds, request.input_tokens, request.output_tokens) == (0.0, 20, 15)
    assert (len(request.block_ids), request.block_tokens) == (2, 16)
    assert request.output_block_ids is not None
    assert len(request.output_block_ids) == 1
    measured = request.measured
    assert isinstance(measured, Measured)
    assert (measured.device_hit, measured.host_hit, measured.storage_hit) == (1, 2, 3)
    assert measured.ttft_seconds is not None
    assert measured.e2e_seconds is not None
    assert 0 <= measured.ttft_seconds <= measured.e2e_seconds


def test_the_file_holds_tokens_only_where_that_was_asked_for(path: Path) -> None:
    tokens = str(list(PROMPT.encode()))[1:-1].replace(" ", "")
    for keep_tokens in (False, True):
        with _recorded(path, FakeEngine(), keep_tokens=keep_tokens) as client:
            client.post("/v1/completions", json=BODY).raise_for_status()
        assert (tokens in path.read_text()) is keep_tokens


def test_equal_prompts_share_ids_within_a_salt_only(path: Path) -> None:
    with _recorded(path, FakeEngine()) as client:
        for salt in ("red", "blue", "red", None):
            client.post("/v1/completions", json={**BODY, "cache_salt": salt}).raise_for_status()
    red, blue, red_again, plain = (set(r.block_ids.tolist()) for r in _requests(path))
    assert red == red_again
    assert not red & blue
    assert not red & plain
    assert not blue & plain


def test_each_prompt_is_a_record_and_of_several_answers_the_first_counts(path: Path) -> None:
    with _recorded(path, FakeEngine()) as client:
        body = {**BODY, "prompt": [PROMPT, PROMPT + "!"], "n": 3}
        client.post("/v1/completions", json=body).raise_for_status()
    assert [(r.input_tokens, r.output_tokens) for r in _requests(path)] == [(20, 3), (21, 3)]


@pytest.mark.parametrize("reason", [FinishReason.FAILED, FinishReason.REFUSED])
def test_what_failed_or_was_refused_or_not_taken_is_left_out(
    path: Path, reason: FinishReason
) -> None:
    engine = FakeEngine()
    with _recorded(path, engine) as client:
        engine.fail = (reason, "this is why")
        client.post("/v1/completions", json=BODY)
        engine.fail, engine.busy = None, True
        assert client.post("/v1/completions", json=BODY).status_code == 429
        engine.busy, engine.fail_after = False, 2
        assert client.post("/v1/completions", json=BODY).status_code == 500
        engine.fail_after = 1 << 30
        client.post("/v1/completions", json=BODY).raise_for_status()
    (request,) = _requests(path)
    assert request.arrival_seconds > 0  # the others arrived before it


def test_an_answer_that_was_cancelled_is_recorded_as_long_as_it_got(path: Path) -> None:
    engine = FakeEngine()
    recording = Recording.to_file(path, block_tokens=16)
    asked = GenerationRequest(engine.codec.encode(PROMPT), SamplingParams(max_tokens=1000))
    recorded = recording.begin(asked, engine.namespace())
    finished: list[Event] = []

    def on_event(event: Event) -> None:
        recorded.observe(event)
        if isinstance(event, FinishEvent):
            finished.append(event)
        else:
            engine.cancel(1)

    engine.submit(asked, on_event)
    _until(lambda: bool(finished))
    recording.close()
    (request,) = _requests(path)
    assert 1 <= request.output_tokens < 1000


def _fill_the_disk(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """From now on a record is written to its half, and then there is no space left."""

    def half(writer: RecordedTraceWriter, *_: object, **__: object) -> None:
        with path.open("ab") as file:
            file.write(b'{"t": 1.0, "in": 20, "ids": [12, 1')
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordedTraceWriter, "append", half)


def test_a_disk_that_fills_ends_the_recording_and_not_the_server(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with _recorded(path, FakeEngine()) as client:
        client.post("/v1/completions", json=BODY).raise_for_status()
        _until(lambda: path.read_text().count("\n") == 2)
        _fill_the_disk(monkeypatch, path)
        for _ in range(3):
            client.post("/v1/completions", json=BODY).raise_for_status()
    assert len(_requests(path)) == 1  # what had been written of the second is gone again
    (line,) = [r.getMessage() for r in caplog.records if "recording to" in r.getMessage()]
    assert "No space left" in line
    assert "the 1 requests before can be read" in line


def test_what_became_of_requests_is_counted_also_after_the_recording_has_ended(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    recording = Recording.to_file(path, block_tokens=16)
    with _client(engine, recording) as client:
        client.post("/v1/completions", json=BODY).raise_for_status()
        engine.busy = True
        client.post("/v1/completions", json=BODY)
        engine.busy = False
        _until(lambda: sum(recording.state.requests.values()) == 2)
        assert recording.state.problem is None
        _fill_the_disk(monkeypatch, path)
        for _ in range(3):
            client.post("/v1/completions", json=BODY).raise_for_status()
        _until(lambda: recording.state.problem is not None)
    recording.close()
    assert recording.state.requests == {"recorded": 1, "left_out": 1, "lost": 3}
    assert "No space left" in str(recording.state.problem)


def test_a_compressed_recording_that_ended_early_says_how_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "live.jsonl.gz"
    with _recorded(path, FakeEngine()) as client:
        _fill_the_disk(monkeypatch, path)
        client.post("/v1/completions", json=BODY).raise_for_status()
    assert "--on-error skip reads those that reached the disk" in caplog.text


def test_a_path_that_cannot_be_written_is_refused_before_the_model_is_looked_for(
    tmp_path: Path,
) -> None:
    for bad in (tmp_path, tmp_path / "missing" / "live.jsonl"):
        with pytest.raises(ConfigError, match=f"cannot record to {bad}: .*--record"):
            launch(EngineConfig(model="no such model"), ServerSettings(port=0, record=bad), print)


def test_tokens_cannot_be_recorded_without_a_file() -> None:
    with pytest.raises(ConfigError, match="--record FILE"):
        ServerSettings(record_tokens=True)
