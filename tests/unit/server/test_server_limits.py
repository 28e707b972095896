"""How long an answer may be: the default has room, and errors name what the client wrote."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs kvtiers[serve]")

from fake_engine import FakeEngine
from fastapi.testclient import TestClient

from kvtiers.server.app import create_app
from kvtiers.server.context import ServerContext
from kvtiers.server.settings import ServerSettings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
HI_TOKENS = len("<user>hi")
LONG = {"model": "fake", "messages": [{"role": "user", "content": "a" * 600}]}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(context_tokens=512)


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    settings = ServerSettings(output_tokens_max=1000)
    context = ServerContext.of(engine, settings, lambda: b"")
    with TestClient(create_app(context), raise_server_exceptions=False) as client:
        yield client


def _asked_for(engine: FakeEngine) -> int:
    return engine.requests[max(engine.requests)].params.max_tokens


def test_a_chat_without_a_limit_may_fill_the_context(
    engine: FakeEngine, client: TestClient
) -> None:
    assert client.post(CHAT, json=HI).status_code == 200
    assert _asked_for(engine) == 512 - HI_TOKENS


def test_a_chat_without_a_limit_asks_for_no_more_than_the_device_holds(
    engine: FakeEngine, client: TestClient
) -> None:
    engine.device_pages = 4  # of 16 tokens
    assert client.post(CHAT, json=HI).status_code == 200
    # The last token of an answer is not computed with: prompt and answer may be one longer.
    assert HI_TOKENS + _asked_for(engine) == 4 * 16 + 1


def test_pinned_tokens_are_no_room_for_an_answer(engine: FakeEngine) -> None:
    engine.device_pages = 8
    engine.host_pages = 0
    context = ServerContext.of(engine, ServerSettings(pin_budget_share=0.5), lambda: b"")
    with TestClient(create_app(context)) as pinning:
        pin = pinning.post("/cache/pins", json={"prompt": "a" * 50}).json()
        assert pin["tokens"] == 48
        pinning.post(CHAT, json=HI)
        assert HI_TOKENS + _asked_for(engine) == 8 * 16 + 1 - 48
        pinning.delete(f"/cache/pins/{pin['pin_id']}")
        pinning.post(CHAT, json=HI)
        assert HI_TOKENS + _asked_for(engine) == 8 * 16 + 1


@pytest.mark.parametrize(("prompt_tokens", "answer_tokens"), [(8, 16), (60, 5), (64, 1), (70, 1)])
def test_a_completion_without_a_limit_asks_for_no_more_than_the_device_holds(
    engine: FakeEngine, client: TestClient, prompt_tokens: int, answer_tokens: int
) -> None:
    engine.device_pages = 4
    body = {"model": "fake", "prompt": "a" * prompt_tokens}
    assert client.post(COMPLETIONS, json=body).status_code == 200
    assert _asked_for(engine) == answer_tokens  # 70: the engine says why it does not fit


def test_a_limit_that_is_given_is_not_lowered(engine: FakeEngine, client: TestClient) -> None:
    engine.device_pages = 4
    client.post(CHAT, json={**HI, "max_tokens": 200})
    assert _asked_for(engine) == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {**HI, "max_tokens": 5000}, "max_tokens"),
        (CHAT, {**HI, "max_completion_tokens": 5000}, "max_completion_tokens"),
        (CHAT, {**HI, "max_tokens": 900}, "max_tokens"),
        (CHAT, {**HI, "max_completion_tokens": 900, "max_tokens": 1}, "max_completion_tokens"),
        (CHAT, LONG, "messages"),
        (CHAT, {**LONG, "max_tokens": 5}, "messages"),
        (COMPLETIONS, {"model": "fake", "prompt": "a" * 600}, "prompt"),
        (COMPLETIONS, {"model": "fake", "prompt": "a", "max_tokens": 900}, "max_tokens"),
    ],
)
def test_what_is_too_long_is_called_as_the_client_called_it(
    client: TestClient, path: str, body: dict[str, Any], param: str
) -> None:
    error = client.post(path, json=body).json()["error"]
    assert error["param"] == param
    assert (f"{param} is" in error["message"]) is param.startswith("max")
