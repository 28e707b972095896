"""Who has no key and what is too long are refused before a byte of the body is read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs kvtiers[serve]")

import json

from fake_engine import FakeEngine

from kvtiers.server.app import create_app
from kvtiers.server.context import ServerContext
from kvtiers.server.settings import ServerSettings

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
JSON = (b"content-type", b"application/json")
RIGHT = (b"authorization", b"Bearer user-key")


def _ask(
    path: str, headers: list[tuple[bytes, bytes]], root_path: str = "", **settings: Any
) -> tuple[int, dict[str, Any], bool]:
    """The status, the error, and whether the body was asked for."""
    app = create_app(ServerContext.of(FakeEngine(), ServerSettings(**settings), lambda: b""))
    read = False
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        nonlocal read
        read = True
        return {"type": "http.request", "body": b"{", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "root_path": root_path,
        "query_string": b"",
        "headers": headers,
    }
    asyncio.run(app(scope, receive, send))
    error = json.loads(b"".join(message.get("body", b"") for message in sent[1:]))["error"]
    return sent[0]["status"], error, read


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/cache/flush"])
@pytest.mark.parametrize(
    "header",
    [
        (b"authorization", b"Bearer wrong"),
        (b"authorization", b"Basic user-key"),
        (b"authorization", b"user-key"),
        (b"authorization", b"Bearer \xff\xfe"),
        (b"x-other", b"user-key"),
    ],
)
def test_without_the_key_a_body_is_not_read(path: str, header: tuple[bytes, bytes]) -> None:
    keys = {"api_key": "user-key", "admin_key": "admin-key"}
    status, error, read = _ask(path, [JSON, header], **keys)
    assert (status, error["code"], read) == (401, "invalid_api_key", False)


def test_a_closed_admin_api_does_not_read_a_body() -> None:
    status, error, read = _ask("/cache/flush", [JSON, RIGHT], api_key="user-key")
    assert (status, error["code"], read) == (403, "admin_closed", False)


def test_with_the_key_the_body_is_what_counts() -> None:
    status, error, read = _ask("/v1/completions", [JSON, RIGHT], api_key="user-key")
    assert (status, error["code"], read) == (400, "malformed_json", True)


def test_no_route_is_open_below_another_root() -> None:
    status, _, _ = _ask("/below/v1/completions", [JSON], root_path="/below", api_key="user-key")
    assert status == 401


def test_a_body_that_says_it_is_too_long_is_not_read() -> None:
    length = (b"content-length", b"101")
    status, error, read = _ask("/v1/completions", [JSON, length], body_bytes_max=100)
    assert (status, error["code"], read) == (413, "body_too_long", False)
    assert "--body-mib-max" in error["message"]


def test_a_body_of_the_longest_length_is_read() -> None:
    length = (b"content-length", b"100")
    status, _, read = _ask("/v1/completions", [JSON, length], body_bytes_max=100)
    assert (status, read) == (400, True)
