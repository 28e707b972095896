"""Hooks for the demo and tests: the logits behind an answer, and a page damaged on purpose.

Mounted with `debug_hooks` only, on the loopback interface only, and left out of the OpenAPI
document. Nothing else in the server depends on this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter
from starlette.responses import Response

from kvtiers.server.context import ServerContext
from kvtiers.server.errors import ApiError
from kvtiers.server.json_body import JsonRoute


def debug_router(context: ServerContext, dependencies: Sequence[Any]) -> APIRouter:
    """The routes, for one server."""
    router = APIRouter(
        route_class=JsonRoute, prefix="/cache/debug", dependencies=list(dependencies)
    )

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

    @router.post("/corrupt-host-page")
    def post_corrupt_host_page() -> dict[str, int]:
        """Overwrite one page that only the host holds: whoever is served from it gets it wrong."""
        damaged = context.engine.call_in_loop(_corrupt_host_page).result()
        if damaged is None:
            raise ApiError(409, "no page is on host alone", code="nothing_to_damage")
        return damaged

    return router


def _corrupt_host_page(parts: Any) -> dict[str, int] | None:
    """Zero the page nearest to a root that is on host and not on device, and at rest."""
    runs = [
        run
        for run in parts.core.state.tree.walk()
        if max(run.device_pages, run.host_start) < run.host_end and not run.locks
    ]
    if not runs:
        return None
    run = min(runs, key=lambda r: (r.start + r.device_pages, r.stamp))
    page = max(run.device_pages, run.host_start)
    slot = int(run.host_slots[page - run.host_start])
    memory = np.frombuffer(parts.pools.host.page(slot), np.uint8)
    changed_bytes = int(np.count_nonzero(memory))
    memory[:] = 0
    return {"host_slot": slot, "page_of_path": run.start + page, "changed_bytes": changed_bytes}
