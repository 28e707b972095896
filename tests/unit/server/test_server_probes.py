"""What monitoring asks is answered whatever the requests are doing, to GET and to HEAD."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="needs kvtiers[serve]")

from fake_engine import ByteCodec, FakeEngine
from fastapi.testclient import TestClient

from kvtiers.server.app import create_app
from kvtiers.server.context import ServerContext
from kvtiers.server.prompts import LONG_BODY_BYTES
from kvtiers.server.settings import ServerSettings

MANY = 60
"""More requests than the worker threads that routes share."""
KEY = {"Authorization": "Bearer key"}


class StuckCodec(ByteCodec):
    """Does not come to the end of a long text until it is told to go on."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.begun = threading.Event()

    def encode(self, text: str) -> np.ndarray:
        if len(text) >= LONG_BODY_BYTES:
            self.begun.set()
            assert self.go_on.wait(60)
        return super().encode(text[:100])


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    engine.codec = StuckCodec()
    yield engine
    engine.codec.go_on.set()


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    context = ServerContext.of(engine, ServerSettings(api_key="key"), lambda: b"metrics")
    with TestClient(create_app(context), raise_server_exceptions=False) as client:
        yield client


def test_many_long_prompts_hold_up_neither_probes_nor_short_prompts(
    engine: FakeEngine, client: TestClient
) -> None:
    body = {"model": "fake", "prompt": "a" * LONG_BODY_BYTES, "max_tokens": 1}
    with ThreadPoolExecutor(MANY + 1) as clients:
        long = [
            clients.submit(client.post, "/v1/completions", json=body, headers=KEY)
            for _ in range(MANY)
        ]
        try:
            assert engine.codec.begun.wait(60)
            for path in ("/health", "/ready", "/metrics", "/v1/models", "/v1/models/fake"):
                asked = clients.submit(client.get, path, headers=KEY)
                assert asked.result(30).status_code == 200
            short = {**body, "prompt": "a few words"}
            asked = clients.submit(client.post, "/v1/completions", json=short, headers=KEY)
            assert asked.result(30).status_code == 200
            assert not any(request.done() for request in long)
        finally:
            engine.codec.go_on.set()
        assert {request.result(60).status_code for request in long} == {200}


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_a_probe_may_ask_with_head(client: TestClient, path: str) -> None:
    head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert path != "/metrics" or head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_head_has_the_status_of_get_when_the_engine_has_stopped(
    engine: FakeEngine, client: TestClient, path: str
) -> None:
    engine.ready = False
    assert client.head(path).status_code == client.get(path).status_code == 503
