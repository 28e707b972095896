"""From settings to a running server: load the engine, say what was decided, serve, release."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvtiers.engine.config import EngineConfig
from kvtiers.metrics.gauges import Gauges
from kvtiers.metrics.prometheus import PrometheusExporter
from kvtiers.server.advice import decisions, warnings
from kvtiers.server.context import ServerContext
from kvtiers.server.lifecycle import listen, serve, url_of
from kvtiers.server.recording import Recording
from kvtiers.server.settings import ServerSettings

LISTENING = "listening on "
"""Begins the line that says where; everything that starts a server as a child waits for it."""


def launch(config: EngineConfig, settings: ServerSettings, say: Callable[[str], None]) -> bool:
    """Serve until a signal ends it; False when requests had to be cancelled at the end.

    The port is taken and the recording opened before the model is loaded, so that a taken port or
    a file that cannot be written is noticed at once.
    """
    bound = listen(settings.host, settings.port)
    recording: Recording | None = None
    try:
        if settings.record is not None:
            recording = Recording.to_file(
                settings.record, config.page_tokens, keep_tokens=settings.record_tokens
            )
        # Imported late for the same reason: torch takes seconds.
        from kvtiers.engine.engine import LLMEngine

        engine = LLMEngine.load(config)

        def gauges() -> Gauges:
            recorded = recording.state.requests if recording is not None else {}
            return replace(engine.gauges(), recorded_requests=recorded)

        exporter = PrometheusExporter(
            engine.parts.ledger,
            gauges,
            model_name=engine.model_name,
            prefix=settings.metrics_prefix,
            extra_labels=dict(settings.metrics_labels),
        )
        for line in decisions(engine, engine.parts.controller.link_ceilings):
            say(line)
        for warning in warnings(engine):
            say(f"warning: {warning}")
        context = ServerContext.of(engine, settings, exporter.render, recording)
        return serve(context, bound, lambda: say(f"{LISTENING}{url_of(bound)}"))
    finally:
        bound.close()
        if recording is not None:
            recording.close()
