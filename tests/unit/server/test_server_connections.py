"""Connections that bring nothing are given back, those that ask are answered."""

from __future__ import annotations

import asyncio
import errno

import pytest

pytest.importorskip("uvicorn", reason="needs kvtiers[serve]")

import uvicorn
from uvicorn.server import ServerState

from kvtiers.server.descriptors import TOLD_SECONDS, RunOut
from kvtiers.server.lifecycle import _Protocol


async def _app(scope: dict, receive: object, send: object) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})  # type: ignore[operator]
    await send({"type": "http.response.body", "body": b""})  # type: ignore[operator]


async def _said_to(request: bytes, idle_seconds: int) -> bytes:
    """All that a server says on one connection, on which it gets this, until it closes it."""
    config = uvicorn.Config(_app, timeout_keep_alive=idle_seconds, log_level="critical")
    config.load()
    state = ServerState()

    def connected() -> asyncio.Protocol:
        return _Protocol(config=config, server_state=state, app_state={})

    server = await asyncio.get_running_loop().create_server(connected, "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        writer.write(request)
        said = await reader.read()
        writer.close()
        await writer.wait_closed()
    return said


def test_a_connection_that_brings_nothing_is_closed() -> None:
    assert asyncio.run(_said_to(b"", idle_seconds=0)) == b""


def test_a_connection_that_asks_is_answered_before_it_is_closed() -> None:
    said = asyncio.run(_said_to(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", idle_seconds=1))
    assert said.startswith(b"HTTP/1.1 204")


def test_file_descriptors_that_have_run_out_are_told_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    times = iter((0.0, 0.0, TOLD_SECONDS - 1, TOLD_SECONDS, TOLD_SECONDS + 1))
    handler = RunOut(clock=lambda: next(times))
    loop = asyncio.new_event_loop()
    refused = {
        "message": "socket.accept() out of system resource",
        "exception": OSError(errno.EMFILE, "Too many open files"),
        "socket": None,
    }
    for _ in range(5):
        handler(loop, refused)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "Too many open files" in told[0]
    assert "ulimit -n" in told[0]
    handler(loop, {"message": "a task failed", "exception": OSError(errno.EPIPE, "Broken pipe")})
    assert "a task failed" in caplog.records[-1].getMessage()
    loop.close()
