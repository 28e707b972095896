"""The admin API under `/cache`: look at the books, empty a tier, attach storage, keep a prefix.

Every command runs on the engine's thread between two steps; the routes are plain functions, so
FastAPI waits for it on a worker thread and the event loop goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Path

from kvtiers.engine.messages import TokenArray
from kvtiers.errors import ConfigError, StorageError
from kvtiers.server.context import ServerContext
from kvtiers.server.errors import ApiError, documented
from kvtiers.server.json_body import JsonRoute
from kvtiers.server.prompts import chat_prompt, completion_prompts
from kvtiers.server.reports import cache_state, ledger_report
from kvtiers.server.requests import FlushRequest, PinRequest
from kvtiers.server.responses import (
    CacheState,
    Flushed,
    LedgerReport,
    Pin,
    PinList,
    StorageAttached,
)
from kvtiers.types import Tier


def admin_router(context: ServerContext, dependencies: Sequence[Any]) -> APIRouter:
    """The routes, for one server."""
    router = APIRouter(
        route_class=JsonRoute, prefix="/cache", dependencies=list(dependencies), tags=["cache"]
    )
    engine, pins = context.engine, context.pins
    one_pin_at_a_time = threading.Lock()

    def pinned() -> dict[int, int]:
        return engine.call_in_loop(lambda parts: dict(parts.ledger.pinned_tokens_by_pin)).result()

    @router.get("/state", summary="Tiers, queues, rates and policies now")
    def get_state() -> CacheState:
        return cache_state(context)

    @router.get("/ledger", summary="Every identity of the books, with its values")
    def get_ledger() -> LedgerReport:
        return ledger_report(context)

    @router.post(
        "/flush", summary="Remove what no request uses from one tier", responses=documented(400)
    )
    def post_flush(body: FlushRequest) -> Flushed:
        return Flushed(tier=body.tier, removed_pages=engine.flush(Tier(body.tier)))

    @router.put(
        "/storage",
        summary="Open the configured storage directory and use it",
        responses=documented(409),
    )
    def put_storage() -> StorageAttached:
        try:
            engine.attach_storage()
        except (StorageError, ConfigError) as error:
            raise ApiError(409, str(error), code="storage_not_attached") from None
        return StorageAttached(attached=True)

    @router.delete("/storage", summary="Stop using storage and release its directory")
    def delete_storage() -> StorageAttached:
        engine.detach_storage()
        return StorageAttached(attached=False)

    @router.post(
        "/pins",
        summary="Keep the cached prefix of a prompt until it is unpinned or its time is over",
        responses=documented(400, 404, 409),
    )
    def post_pin(body: PinRequest) -> Pin:
        prompt = _prompt_of(context, body)
        with one_pin_at_a_time:
            held_tokens = sum(pinned().values())
            pin_id = engine.pin(prompt, body.cache_salt or "", body.ttl_seconds)
            if pin_id is None:
                raise ApiError(
                    404,
                    "nothing of this prompt is cached on device or host, so there is nothing to "
                    "keep; send it as a request first",
                    code="nothing_cached",
                )
            tokens_by_pin = pinned()
            tokens = tokens_by_pin.get(pin_id, 0)
            if held_tokens + tokens > pins.budget_tokens:
                engine.unpin(pin_id)
                raise ApiError(
                    409,
                    f"pinning {tokens} tokens beside the {held_tokens} already pinned exceeds the "
                    f"budget of {pins.budget_tokens} tokens; unpin something or raise "
                    "--pin-budget-share",
                    code="pin_budget_exceeded",
                )
            pins.add(pin_id, time.monotonic() + body.ttl_seconds, tokens_by_pin)
        return Pin(pin_id=pin_id, tokens=tokens, expires_in_seconds=body.ttl_seconds)

    @router.get("/pins", summary="The pins that are held")
    def get_pins() -> PinList:
        held = pins.held(pinned(), time.monotonic())
        return PinList(
            pins=[
                Pin(pin_id=p.pin_id, tokens=p.tokens, expires_in_seconds=p.seconds_left)
                for p in held
            ],
            pinned_tokens=sum(p.tokens for p in held),
            budget_tokens=pins.budget_tokens,
        )

    @router.delete("/pins/{pin_id}", summary="Let a prefix go", responses=documented(400, 404))
    def delete_pin(pin_id: int = Path(ge=0, lt=1 << 63)) -> Pin:
        with one_pin_at_a_time:
            tokens = pinned().get(pin_id)
            if tokens is None:
                raise ApiError(
                    404, f"no pin {pin_id} is held; GET /cache/pins lists them", code="no_such_pin"
                )
            engine.unpin(pin_id)
            pins.remove(pin_id)
        return Pin(pin_id=pin_id, tokens=tokens, expires_in_seconds=0.0)

    return router


def _prompt_of(context: ServerContext, body: PinRequest) -> TokenArray:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(
            400, "send either 'prompt' or 'messages'", code="invalid_value", param="prompt"
        )
    if body.messages is not None:
        return chat_prompt(context.engine, body.messages)
    assert body.prompt is not None
    return completion_prompts(context.engine, body.prompt)[0]
