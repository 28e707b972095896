"""What stands before every route: the request id, the body limit, and the keys.

The middleware is plain ASGI, so that streams pass through it untouched and a route's `receive`
still tells when the client has gone.
"""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Callable
from typing import Any

from fastapi import Depends, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtiers.server.errors import ApiError

REQUEST_ID_HEADER = "x-request-id"
_ACCEPTABLE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Guard:
    """Gives every request an id (the client's own, if it is sane) and refuses over-long bodies."""

    def __init__(self, app: ASGIApp, body_bytes_max: int) -> None:
        self._app = app
        self._body_bytes_max = body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        received_bytes = 0

        async def counted_receive() -> Message:
            nonlocal received_bytes
            message = await receive()
            if message["type"] == "http.request":
                received_bytes += len(message.get("body", b""))
                if received_bytes > self._body_bytes_max:
                    raise ApiError(
                        413,
                        f"the body is longer than the {self._body_bytes_max} bytes this server "
                        "accepts; shorten the prompt or raise --body-mib-max",
                        code="body_too_long",
                    )
            return message

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", ()),
                    (REQUEST_ID_HEADER.encode(), request_id.encode()),
                ]
            await send(message)

        await self._app(scope, counted_receive, send_with_id)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == REQUEST_ID_HEADER.encode():
            text = value.decode("latin-1")
            if _ACCEPTABLE_ID.fullmatch(text):
                return str(text)
    return uuid.uuid4().hex


_bearer = HTTPBearer(auto_error=False)


def require_key(key: str | None) -> list[Any]:
    """Dependencies for routes behind `key`; none at all where there is no key.

    Only a server with a key publishes a security scheme, so its OpenAPI document stays true.
    """
    if key is None:
        return []
    return [Depends(_key_check(key))]


def _key_check(key: str) -> Callable[..., None]:
    def check(credentials: HTTPAuthorizationCredentials | None = Security(_bearer)) -> None:  # noqa: B008
        given = credentials.credentials if credentials is not None else ""
        # Compared in constant time, as bytes: a header may hold any characters.
        if not hmac.compare_digest(given.encode(), key.encode()):
            raise ApiError(
                401,
                "the key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )

    return check


def closed(message: str) -> list[Any]:
    """Dependencies for routes that this server does not open to anybody."""

    def refuse() -> None:
        raise ApiError(403, message, code="admin_closed")

    return [Depends(refuse)]
