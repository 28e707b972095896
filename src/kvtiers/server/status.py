"""What monitoring asks: the models, whether the server lives and takes requests, the metrics."""

from __future__ import annotations

from collections.abc import Sequence
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
    def list_models() -> ModelList:
        return ModelList(data=[card()])

    @router.get("/{model}", summary="One model", responses=documented(404))
    def get_model(model: str) -> ModelCard:
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
    """GET /health, /ready and /metrics; open to everybody who can reach the port."""
    router = APIRouter(tags=["status"])

    @router.get(
        "/health", summary="Whether the process is worth keeping", responses=documented(503)
    )
    def get_health() -> Health:
        if context.draining:
            return Health(status="draining")
        if not context.engine.ready:
            raise ApiError(
                503, "the engine's loop has stopped; restart the server", code="engine_stopped"
            )
        return Health(status="ok")

    @router.get("/ready", summary="Whether requests are taken", responses=documented(503))
    def get_ready() -> Health:
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
    def get_metrics() -> Response:
        return Response(context.metrics(), headers={"content-type": CONTENT_TYPE})

    return router
