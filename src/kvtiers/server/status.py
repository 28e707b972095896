"""What monitoring asks: the models, whether the server lives and takes requests, the metrics.

These are answered on the loop, where they wait for no worker thread: where a probe waits behind
requests, a server is restarted for being busy. The metrics are rendered on a thread of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from kvtiers.metrics.prometheus import CONTENT_TYPE
from kvtiers.server.context import ServerContext
from kvtiers.server.errors import ApiError, documented
from kvtiers.server.responses import Health, ModelCard, ModelList


def models_router(context: ServerContext, dependencies: Sequence[Any]) -> APIRouter:
    """GET /v1/models and one of them."""
    router = APIRouter(prefix="/v1/models", dependencies=list(dependencies), tags=["models"])
    engine = context.engine

    def card() -> ModelCard:
        return ModelCard(
            id=engine.model_name,
            created=context.started_at_unix,
            owned_by="kvtiers",
            max_model_len=engine.context_tokens,
        )

    @router.get("", summary="The model this server has")
    async def list_models() -> ModelList:
        return ModelList(data=[card()])

    @router.get("/{model}", summary="One model", responses=documented(404))
    async def get_model(model: str) -> ModelCard:
        if model != engine.model_name:
            raise ApiError(
                404,
                f"model '{model}' is not served here; this server has '{engine.model_name}'",
                code="model_not_found",
                param="model",
            )
        return card()

    return router


def status_router(context: ServerContext) -> APIRouter:
    """GET and HEAD of /health, /ready and /metrics; open to everybody who can reach the port."""
    router = APIRouter(tags=["status"])
    rendering = ThreadPoolExecutor(1, "kvtiers-metrics")

    @router.get(
        "/health", summary="Whether the process is worth keeping", responses=documented(503)
    )
    async def get_health() -> Health:
        if context.draining:
            return Health(status="draining")
        if not context.engine.ready:
            raise ApiError(
                503, "the engine's loop has stopped; restart the server", code="engine_stopped"
            )
        return Health(status="ok")

    @router.get("/ready", summary="Whether requests are taken", responses=documented(503))
    async def get_ready() -> Health:
        if context.draining or not context.engine.ready:
            why = "it is draining" if context.draining else "the engine's loop has stopped"
            raise ApiError(503, f"the server takes no requests: {why}", code="not_ready")
        return Health(status="ok")

    @router.get(
        "/metrics",
        summary="Prometheus metrics, read from the ledger",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def get_metrics() -> Response:
        text = await asyncio.get_running_loop().run_in_executor(rendering, context.metrics)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    # Probes ask with HEAD: the same status, no body.
    no_body: dict[int | str, dict[str, Any]] = {503: {"description": "As for GET"}}

    @router.head("/health", response_class=Response, responses=no_body)
    async def head_health() -> Response:
        await get_health()
        return Response()

    @router.head("/ready", response_class=Response, responses=no_body)
    async def head_ready() -> Response:
        await get_ready()
        return Response()

    @router.head("/metrics", response_class=Response)
    async def head_metrics() -> Response:
        return Response(headers={"content-type": CONTENT_TYPE})

    return router
