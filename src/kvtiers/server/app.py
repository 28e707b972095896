"""Puts one server together: routes, guard, error handlers, and a truthful OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

import kvtiers
from kvtiers.server.admin import admin_router
from kvtiers.server.chat import chat_router
from kvtiers.server.completions import completions_router
from kvtiers.server.context import ServerContext
from kvtiers.server.debug import debug_router
from kvtiers.server.errors import documented, install_handlers
from kvtiers.server.guard import Door, Guard
from kvtiers.server.status import models_router, status_router

_ADMIN_CLOSED = (
    "this server has an API key but no admin key, so /cache is closed; start it with --admin-key"
)


def create_app(context: ServerContext) -> FastAPI:
    """The ASGI application of one server."""
    settings = context.settings
    app = FastAPI(
        title="kvtiers",
        version=kvtiers.__version__,
        summary="An OpenAI-compatible server whose KV cache has three tiers and balanced books",
        redirect_slashes=False,
    )
    user = Door("/v1", settings.api_key)
    admin = Door("/cache", settings.admin_key)
    if settings.api_key and not settings.admin_key:
        admin = Door("/cache", closed=_ADMIN_CLOSED)
    install_handlers(app)
    app.add_middleware(Guard, body_bytes_max=settings.body_bytes_max, doors=(user, admin))

    user_errors = documented(401) if user.key else {}
    for router in (completions_router, chat_router, models_router):
        app.include_router(router(context, user.dependencies()), responses=user_errors)
    app.include_router(status_router(context))
    admin_errors = documented(403) if admin.closed else documented(401) if admin.key else {}
    app.include_router(admin_router(context, admin.dependencies()), responses=admin_errors)
    if settings.debug_hooks:
        app.include_router(debug_router(context, admin.dependencies()), include_in_schema=False)

    _publish_truthfully(app, context.engine.model_name)
    return app


def _publish_truthfully(app: FastAPI, model_name: str) -> None:
    """Make the published document say what this server does.

    FastAPI documents 422 for invalid input, while here that is a 400 in the OpenAI shape; and the
    document can name the one model that this server has.
    """
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = generate()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        schemas = document["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for name in ("CompletionRequest", "ChatRequest"):
            schemas[name]["properties"]["model"]["enum"] = [model_name]
        return document

    app.openapi = openapi  # type: ignore[method-assign]
