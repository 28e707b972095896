"""Start, serve, drain, exit.

    start ──> listening, ready ──SIGTERM/SIGINT──> draining ──> exit 0
                                     │
                                     └── again: stop at once; what runs ends as cancelled

While draining, the port stays open: answers in progress are finished, `/ready` says 503 and new
requests are refused with 503. What was acknowledged as stored is there for the next start.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from kvtiers.errors import ConfigError
from kvtiers.server.app import create_app
from kvtiers.server.context import ServerContext
from kvtiers.server.descriptors import RunOut, allow_all

log = logging.getLogger("kvtiers.server")

CONNECTIONS_CLOSE_SECONDS = 5
KEEP_ALIVE_SECONDS = 75
"""How long an idle connection stays open: longer than clients and proxies keep theirs, so that it
is never the server that closes a connection on which a request is just arriving. Also the time in
which a new connection must bring something: each holds a file descriptor."""


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to `host:port` (0: a free port). `ConfigError` when that cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        way_out = (
            "choose another --port (0 takes a free one)"
            if error.errno in (errno.EADDRINUSE, errno.EACCES)
            else "choose a --host of this machine, such as 127.0.0.1, or 0.0.0.0 for all"
        )
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; {way_out}") from None
    return bound


def url_of(bound: socket.socket) -> str:
    """The address clients use."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's, which limits how long a connection is idle only after its first request."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        # Its own timer: what arrives stops it, and it closes a connection that brought nothing.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: that would end the process by the signal."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(context: ServerContext, bound: socket.socket, on_listening: Callable[[], None]) -> bool:
    """Serve until a signal ends it; False when requests had to be cancelled at the end.

    The engine is started here and stopped before this returns.
    """
    return asyncio.run(_serve(context, bound, on_listening))


async def _serve(
    context: ServerContext, bound: socket.socket, on_listening: Callable[[], None]
) -> bool:
    server = _Server(
        uvicorn.Config(
            create_app(context),
            http=_Protocol,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=CONNECTIONS_CLOSE_SECONDS,
        )
    )
    drains: list[asyncio.Task[None]] = []
    drained = True

    async def drain() -> None:
        nonlocal drained
        seconds, alive = context.settings.drain_seconds, context.engine.ready
        try:
            drained = await asyncio.to_thread(context.engine.drain, seconds)
            if alive and not drained and not server.force_exit:
                log.warning(
                    "answers that were not finished after %g seconds were cancelled; a larger "
                    "--drain-seconds lets them end",
                    seconds,
                )
        finally:
            server.should_exit = True

    def on_signal() -> None:
        if server.force_exit:
            return
        if context.draining:
            log.warning("second signal: stopping at once, what runs ends as cancelled")
            server.should_exit = server.force_exit = True
            return
        context.draining = True
        log.info(
            "draining for up to %g seconds; a second signal stops at once",
            context.settings.drain_seconds,
        )
        drains.append(asyncio.create_task(drain()))

    allow_all()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(RunOut())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    context.engine.start()
    try:
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started:
            on_listening()
        await serving
        if not server.force_exit:
            await asyncio.gather(*drains)
    finally:
        await asyncio.to_thread(context.engine.stop)
    return drained and not server.force_exit
