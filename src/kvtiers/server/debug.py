"""Hooks for the demo and tests: the logits behind an answer, and a page damaged on purpose.

Mounted with `debug_hooks` only, on the loopback interface only, and left out of the OpenAPI
document. Nothing else in the server depends on this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from kvtiers.server.context import ServerContext
from kvtiers.server.errors import ApiError


def debug_router(context: ServerContext, dependencies: Sequence[Any]) -> APIRouter:
    """The routes, for one server."""
    router = APIRouter(prefix="/cache/debug", dependencies=list(dependencies))

    @router.get("/logits/{request_id}")
    def get_logits(request_id: str) -> Response:
        """float32 of shape (answer tokens, vocabulary), and the answer's token ids in a header."""
        capture = context.captures.take(request_id)
        if capture is None:
            raise ApiError(404, f"no logits are kept for request '{request_id}'", code="no_logits")
        logits = context.engine.take_logits(capture.engine_request_id, capture.index)
        if logits is None:
            raise ApiError(404, f"the logits of '{request_id}' are gone", code="no_logits")
        return Response(
            logits.astype("<f4", copy=False).tobytes(),
            media_type="application/octet-stream",
            headers={"x-output-ids": ",".join(map(str, capture.output_ids))},
        )

    return router
