"""What becomes of a request when the engine fails, refuses, is busy, or the client has gone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs kvtiers[serve]")

from fake_engine import FakeEngine
from fastapi.testclient import TestClient

from kvtiers.engine.messages import FinishReason
from kvtiers.errors import ConfigError
from kvtiers.server.app import create_app
from kvtiers.server.context import ServerContext
from kvtiers.server.lifecycle import listen
from kvtiers.server.responses import ChatCompletion, ChatCompletionChunk, Completion
from kvtiers.server.settings import ServerSettings

BODY = {"model": "fake", "prompt": "hello", "max_tokens": 3}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@contextmanager
def _client(engine: FakeEngine, **settings: object) -> Iterator[TestClient]:
    context = ServerContext.of(engine, ServerSettings(**settings), lambda: b"")  # type: ignore[arg-type]
    with TestClient(create_app(context), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    with _client(engine) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "status"),
    [(FinishReason.FAILED, 500), (FinishReason.REFUSED, 400), (FinishReason.CANCELLED, 503)],
)
def test_an_answer_that_never_began_has_a_proper_status(
    engine: FakeEngine, client: TestClient, reason: FinishReason, status: int, stream: bool
) -> None:
    engine.fail = (reason, "this is why")
    response = client.post("/v1/completions", json={**BODY, "stream": stream})
    assert response.status_code == status
    assert response.json()["error"]["message"] == "this is why"


def test_a_failure_in_the_middle_of_a_stream_ends_it_with_an_error_event(
    engine: FakeEngine, client: TestClient
) -> None:
    engine.fail_after = 2
    text = client.post("/v1/completions", json={**BODY, "stream": True}).text
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["type"] == "server_error"
    assert len(events) == 4


PATHS = [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)]


def _events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_what_there_is_at_the_deadline_is_the_answer(
    engine: FakeEngine, client: TestClient, path: str, body: dict[str, Any]
) -> None:
    engine.deadline_after = 2
    answer = client.post(path, json=body).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_a_stream_that_meets_its_deadline_ends_as_one_cut_by_its_length(
    engine: FakeEngine, client: TestClient, path: str, body: dict[str, Any]
) -> None:
    engine.deadline_after = 2
    more = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, finish, usage, done = _events(client.post(path, json={**body, **more}).text)
    assert done == "[DONE]"
    assert json.loads(usage)["usage"]["completion_tokens"] == 2
    assert json.loads(finish)["choices"][0]["finish_reason"] == "length"
    assert [json.loads(chunk)["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_before_the_first_token_is_504_with_the_way_out(
    engine: FakeEngine, stream: bool
) -> None:
    engine.deadline_after = 0
    with _client(engine, request_timeout_seconds=7.5) as client:
        response = client.post("/v1/completions", json={**BODY, "stream": stream})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (504, "timeout")
    assert "7.5 seconds" in error["message"]
    assert "--request-timeout-seconds" in error["message"]


def test_of_several_answers_each_has_what_it_had_at_the_deadline(
    engine: FakeEngine, client: TestClient
) -> None:
    engine.deadline_after = 4
    answer = client.post("/v1/completions", json={**BODY, "n": 2}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["hel", "h"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
    assert answer["usage"]["completion_tokens"] == 4


def test_of_several_answers_one_without_a_token_at_the_deadline_fails_the_request(
    engine: FakeEngine, client: TestClient
) -> None:
    engine.deadline_after = 3
    assert client.post("/v1/completions", json={**BODY, "n": 2}).status_code == 504
    streamed = client.post("/v1/completions", json={**BODY, "n": 2, "stream": True})
    *_, error, done = _events(streamed.text)
    assert (json.loads(error)["error"]["code"], done) == ("timeout", "[DONE]")


def test_a_bug_in_the_middle_of_a_stream_is_told_in_the_stream(
    engine: FakeEngine, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtiers.server.completions.wire_reason", lambda reason: 1 // 0)
    *_, error, done = _events(client.post("/v1/completions", json={**BODY, "stream": True}).text)
    assert (json.loads(error)["error"]["code"], done) == ("internal_error", "[DONE]")


def test_a_full_queue_is_429_and_a_stopped_engine_503(
    engine: FakeEngine, client: TestClient
) -> None:
    engine.busy = True
    full = client.post("/v1/completions", json=BODY)
    assert (full.status_code, full.headers["retry-after"]) == (429, "1")
    engine.ready = False
    assert client.post("/v1/completions", json=BODY).status_code == 503
    assert client.get("/ready").status_code == 503
    assert client.get("/health").status_code == 503


def test_when_one_prompt_of_several_is_not_taken_the_others_are_cancelled(
    engine: FakeEngine, client: TestClient
) -> None:
    engine.busy_after = 1
    response = client.post("/v1/completions", json={**BODY, "prompt": ["one", "two"]})
    assert response.status_code == 429
    assert engine.cancelled == {1}


def test_logits_are_captured_with_debug_hooks_only(engine: FakeEngine) -> None:
    headers = {"x-kvtiers-capture-logits": "1"}
    for debug_hooks in (False, True):
        with _client(engine, debug_hooks=debug_hooks) as client:
            client.post("/v1/completions", json=BODY, headers=headers)
            assert engine.requests[max(engine.requests)].capture_logits is debug_hooks
            assert ("/cache/debug/logits" in str(client.get("/openapi.json").json())) is False


def test_debug_hooks_are_refused_on_an_open_interface() -> None:
    with pytest.raises(ValueError, match=r"127\.0\.0\.1 only"):
        ServerSettings(host="0.0.0.0", debug_hooks=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"metrics_prefix": "9x"}, "metrics prefix '9x'"),
        ({"metrics_labels": (("a-b", "1"),)}, "'a-b' is not a valid Prometheus label name"),
        ({"metrics_labels": (("tier", "1"),)}, "'tier' is one that series have already"),
        ({"metrics_labels": (("pod", "1"), ("pod", "2"))}, "'pod' is given 2 times"),
    ],
)
def test_names_that_prometheus_would_not_take_are_refused_before_a_model_is_loaded(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerSettings(**settings)


def test_the_server_writes_what_its_document_promises(client: TestClient) -> None:
    more = {"logprobs": 1, "n": 2, "return_cached_tokens_details": True}
    Completion.model_validate(client.post("/v1/completions", json={**BODY, **more}).json())
    chat = {**CHAT, "logprobs": True, "top_logprobs": 1, "stream_options": {"include_usage": True}}
    ChatCompletion.model_validate(client.post("/v1/chat/completions", json=chat).json())
    streamed = client.post("/v1/chat/completions", json={**chat, "stream": True}).text
    lines = [line.removeprefix("data: ") for line in streamed.split("\n\n") if line]
    chunks = [ChatCompletionChunk.model_validate_json(line) for line in lines[:-1]]
    assert chunks[-1].usage is not None
    plain = client.post("/v1/completions", json={**BODY, "stream": True}).text
    for line in plain.split("\n\n"):
        if line and not line.endswith("[DONE]"):
            Completion.model_validate_json(line.removeprefix("data: "))


def test_the_other_answers_of_a_prompt_do_not_count_its_tokens_again(client: TestClient) -> None:
    usage = client.post("/v1/completions", json={**BODY, "n": 3}).json()["usage"]
    assert usage["completion_tokens"] == 9
    assert usage["prompt_tokens_details"]["cached_tokens_details"] == {
        "device": 1,
        "host": 2,
        "storage": 3,
    }


def test_an_address_that_cannot_be_had_names_the_option_to_change() -> None:
    with pytest.raises(ConfigError, match="choose a --host of this machine"):
        listen("192.0.2.1", 0)  # an address for documentation: no machine has it
    with closing(listen("127.0.0.1", 0)) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="choose another --port"):
            listen("127.0.0.1", taken.getsockname()[1])
