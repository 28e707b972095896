"""Requests of several prompts: they get all their places in the queue, or take none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs kvtiers[serve]")

from fake_engine import FakeEngine
from fastapi.testclient import TestClient

from kvtiers.engine.messages import Event, GenerationRequest
from kvtiers.server.app import create_app
from kvtiers.server.context import ServerContext
from kvtiers.server.settings import ServerSettings

LIMIT = 8
BODY = {"model": "fake", "max_tokens": 1}


class HeldEngine(FakeEngine):
    """Answers nothing until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.config = replace(self.config, max_waiting_requests=LIMIT)
        self.go_on = threading.Event()
        self.came = threading.Semaphore(0)

    def submit(
        self, request: GenerationRequest, on_event: Callable[[Event], None]
    ) -> SimpleNamespace:
        self.came.release()
        return super().submit(request, on_event)

    def _run(self, request_id: int, request: GenerationRequest, on_event: Any) -> None:
        assert self.go_on.wait(60)
        super()._run(request_id, request, on_event)


@pytest.fixture
def engine() -> Iterator[HeldEngine]:
    engine = HeldEngine()
    yield engine
    engine.go_on.set()


@pytest.fixture
def context(engine: HeldEngine) -> ServerContext:
    return ServerContext.of(engine, ServerSettings(), lambda: b"")


@pytest.fixture
def client(context: ServerContext) -> Iterator[TestClient]:
    with TestClient(create_app(context), raise_server_exceptions=False) as client:
        yield client


def _prompts(number: int, **more: Any) -> dict[str, Any]:
    return {**BODY, "prompt": ["some words"] * number, **more}


@pytest.mark.parametrize("body", [_prompts(LIMIT + 1), _prompts(3, n=4), _prompts(64, n=16)])
def test_prompts_that_can_never_wait_together_are_refused_for_good(
    engine: HeldEngine, client: TestClient, body: dict[str, Any]
) -> None:
    response = client.post("/v1/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "too_many_prompts")
    assert f"at most {LIMIT} may wait" in error["message"]
    assert "--max-waiting-requests" in error["message"]
    assert not engine.requests


@pytest.mark.parametrize("body", [_prompts(LIMIT), _prompts(2, n=7), _prompts(1, n=16)])
def test_prompts_that_fit_into_an_empty_queue_are_taken(
    engine: HeldEngine, client: TestClient, context: ServerContext, body: dict[str, Any]
) -> None:
    engine.go_on.set()
    assert client.post("/v1/completions", json=body).status_code == 200
    assert context.waiting.taken == 0


def test_prompts_that_do_not_fit_now_are_told_so_before_any_is_submitted(
    engine: HeldEngine, client: TestClient, context: ServerContext
) -> None:
    with ThreadPoolExecutor(1) as other:
        first = other.submit(client.post, "/v1/completions", json=_prompts(5))
        try:
            for _ in range(5):
                assert engine.came.acquire(timeout=60)
            refused = client.post("/v1/completions", json=_prompts(4))
            assert refused.status_code == 429
            assert "5 wait already, of 8" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"] == "1"
            assert len(engine.requests) == 5
            assert not engine.cancelled
        finally:
            engine.go_on.set()
        assert first.result(60).status_code == 200
    assert client.post("/v1/completions", json=_prompts(4)).status_code == 200
    assert context.waiting.taken == 0


def test_a_prompt_that_the_engine_does_not_take_gives_its_place_back(
    engine: HeldEngine, client: TestClient, context: ServerContext
) -> None:
    engine.busy = True
    response = client.post("/v1/completions", json=_prompts(1))
    assert response.status_code == 429
    assert "--max-waiting-requests" in response.json()["error"]["message"]
    assert context.waiting.taken == 0
