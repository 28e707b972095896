"""Values that ask for nothing special are taken, whoever sends them; all others are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs kvtiers[serve]")

from fake_engine import FakeEngine
from fastapi.testclient import TestClient

from kvtiers.server.app import create_app
from kvtiers.server.context import ServerContext
from kvtiers.server.requests import ChatRequest, CompletionRequest, Message
from kvtiers.server.settings import ServerSettings

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "fake", "prompt": "hello", "max_tokens": 3},
    CHAT: {"model": "fake", "messages": [USER], "max_tokens": 3},
}
PAGE = Path(__file__).resolve().parents[3] / "docs" / "api.md"

NEUTRAL_IN_BOTH: list[dict[str, Any]] = [
    {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
    {"repetition_penalty": 1, "min_p": 0, "top_k": -1, "logit_bias": {}},
    {"skip_special_tokens": True, "ignore_eos": False, "priority": 0},
    {"service_tier": "auto"},
    {"service_tier": "default"},
    {"stop": ""},
    {"stop": [""]},
    {"stream_options": {"include_usage": None, "continuous_usage_stats": False}},
    {"stream_options": {"include_obfuscation": False}},
    {"metadata": {"run": "17"}, "safety_identifier": "a", "prompt_cache_key": "b", "user": "c"},
]
NEUTRAL_IN_CHAT: list[dict[str, Any]] = [
    {"tools": [], "functions": [], "tool_choice": "none", "function_call": "none"},
    {"tool_choice": "auto", "parallel_tool_calls": True},
    {"parallel_tool_calls": False, "store": False, "modalities": ["text"]},
    {"response_format": {"type": "text"}, "logprobs": False, "top_logprobs": 0},
]
NOT_NEUTRAL: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"repetition_penalty": 1.1}),
    (COMPLETIONS, {"min_p": 0.1}),
    (COMPLETIONS, {"skip_special_tokens": False}),
    (COMPLETIONS, {"service_tier": "flex"}),
    (COMPLETIONS, {"suffix": "the end"}),
    (COMPLETIONS, {"stream_options": {"continuous_usage_stats": True}}),
    (CHAT, {"tool_choice": "required"}),
    (CHAT, {"reasoning_effort": "low"}),
    (CHAT, {"verbosity": "low"}),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": "x", "refusal": "no"}]}),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": "x", "tool_calls": [{}]}]}),
]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    context = ServerContext.of(engine, ServerSettings(), lambda: b"")
    with TestClient(create_app(context), raise_server_exceptions=False) as client:
        yield client


def _model(path: str) -> type[CompletionRequest] | type[ChatRequest]:
    return CompletionRequest if path == COMPLETIONS else ChatRequest


@pytest.mark.parametrize("path", BODIES)
def test_null_is_taken_for_every_parameter_that_may_be_left_out(
    client: TestClient, path: str
) -> None:
    fields = _model(path).model_fields
    nothing = {name: None for name, field in fields.items() if not field.is_required()}
    response = client.post(path, json={**nothing, **BODIES[path]})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "more"),
    [(path, more) for path in BODIES for more in NEUTRAL_IN_BOTH]
    + [(CHAT, more) for more in NEUTRAL_IN_CHAT]
    + [(COMPLETIONS, {"suffix": "", "echo": False, "best_of": 1})],
)
def test_a_value_that_asks_for_nothing_special_is_taken(
    client: TestClient, path: str, more: dict[str, Any]
) -> None:
    response = client.post(path, json={**BODIES[path], **more})
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 3


def test_an_answer_can_be_sent_back_with_all_its_empty_members(client: TestClient) -> None:
    optional = {n: None for n, field in Message.model_fields.items() if not field.is_required()}
    assert set(optional) >= {"refusal", "annotations", "audio", "function_call", "tool_calls"}
    answer = {**optional, "role": "assistant", "content": "x"}
    messages = [USER, answer, {**answer, "annotations": [], "tool_calls": []}, USER]
    response = client.post(CHAT, json={**BODIES[CHAT], "messages": messages})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(("path", "more"), NOT_NEUTRAL)
def test_any_other_value_is_refused_by_name(
    client: TestClient, path: str, more: dict[str, Any]
) -> None:
    response = client.post(path, json={**BODIES[path], **more})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "unsupported_parameter"
    assert "is not supported by this server" in error["message"]


def test_an_empty_stop_text_does_not_end_an_answer(engine: FakeEngine, client: TestClient) -> None:
    client.post(COMPLETIONS, json={**BODIES[COMPLETIONS], "stop": ["", "x"]})
    assert engine.requests[1].params.stop == ("x",)


@pytest.mark.parametrize("path", BODIES)
def test_a_priority_is_refused_where_the_schedule_policy_knows_none(
    engine: FakeEngine, client: TestClient, path: str
) -> None:
    for policy in ("fcfs", "lpm"):
        engine.config = replace(engine.config, schedule_policy=policy)
        response = client.post(path, json={**BODIES[path], "priority": 5})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "priority")
        assert "--schedule-policy priority" in error["message"]
    engine.config = replace(engine.config, schedule_policy="priority")
    assert client.post(path, json={**BODIES[path], "priority": 5}).status_code == 200
    assert [request.priority for request in engine.requests.values()] == [5]


def test_every_parameter_is_on_the_page_about_the_api() -> None:
    page = PAGE.read_text("utf-8")
    models = (CompletionRequest, ChatRequest, Message)
    missing = [n for model in models for n in model.model_fields if f"`{n}" not in page]
    assert not missing
