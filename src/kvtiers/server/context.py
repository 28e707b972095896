"""What every route of one server shares."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtiers.engine.port import Engine
from kvtiers.server.captures import Captures
from kvtiers.server.pins import PinBook
from kvtiers.server.prompts import Tokenizing
from kvtiers.server.recording import Recording
from kvtiers.server.settings import ServerSettings
from kvtiers.server.waiting import WaitingRoom


@dataclass(slots=True)
class ServerContext:
    """One engine behind one HTTP server.

    `metrics` renders the Prometheus exposition. `recording` is None where nothing is recorded.
    `draining` is set once, by the life cycle.
    """

    engine: Engine
    settings: ServerSettings
    metrics: Callable[[], bytes]
    pins: PinBook
    waiting: WaitingRoom
    recording: Recording | None = None
    captures: Captures = field(default_factory=Captures)
    tokenizing: Tokenizing = field(default_factory=Tokenizing)
    started_at: float = field(default_factory=time.monotonic)
    started_at_unix: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False

    @classmethod
    def of(
        cls,
        engine: Engine,
        settings: ServerSettings,
        metrics: Callable[[], bytes],
        recording: Recording | None = None,
    ) -> ServerContext:
        """The context of a server that begins now."""
        # A pin keeps its pages on device as well as on host: a share of the larger tier might be
        # all of the smaller one, and then nothing else can run.
        tier_pages = min(engine.device_pages, engine.host_pages or engine.device_pages)
        budget_tokens = int(tier_pages * settings.pin_budget_share) * engine.config.page_tokens
        waiting = WaitingRoom(engine.config.max_waiting_requests)
        return cls(engine, settings, metrics, PinBook(budget_tokens), waiting, recording)
