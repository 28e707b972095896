"""What stands before every route: the request id, the keys, and the body limit.

The middleware is plain ASGI, so that streams pass through it untouched and a route's `receive`
still tells when the client has gone. It refuses before it reads: who has no key learns nothing but
that, and a body that says it is too long is not taken.
"""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtiers.server.errors import ApiError

REQUEST_ID_HEADER = "x-request-id"
_ACCEPTABLE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_bearer = HTTPBearer(auto_error=False)


@dataclass(frozen=True, slots=True)
class Door:
    """Who may use the routes below a path: everybody, who has the key, or nobody.

    `closed` says why it is nobody.
    """

    path: str
    key: str | None = None
    closed: str = ""

    def leads_to(self, path: str) -> bool:
        """Whether a route with this path lies behind it."""
        return path == self.path or path.startswith(f"{self.path}/")

    def refusal(self, authorization: str) -> ApiError | None:
        """Why a request with this `Authorization` may not pass; None: it may."""
        if self.closed:
            return ApiError(403, self.closed, code="admin_closed")
        if self.key is None:
            return None
        scheme, _, given = authorization.partition(" ")
        # Compared in constant time, as bytes: a header may hold any characters.
        right = hmac.compare_digest(given.strip().encode(), self.key.encode())
        if right and scheme.lower() == "bearer":
            return None
        return ApiError(
            401,
            "the key is missing or wrong; send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
        )

    def dependencies(self) -> list[Any]:
        """The same check for the routes themselves, so that none is open where the guard sees
        another path than they; with a key they publish a security scheme."""

        async def check(http: Request) -> None:
            refusal = self.refusal(http.headers.get("authorization", ""))
            if refusal is not None:
                raise refusal

        if self.closed:
            return [Depends(check)]
        return [] if self.key is None else [Security(_bearer), Depends(check)]


class Guard:
    """Gives every request an id (the client's own, if it is sane), and refuses who has no key and
    what is too long."""

    def __init__(self, app: ASGIApp, body_bytes_max: int, doors: Sequence[Door]) -> None:
        self._app = app
        self._body_bytes_max = body_bytes_max
        self._doors = doors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = _request_id(headers)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["body_bytes"] = 0

        async def counted_receive() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                state["body_bytes"] += len(message.get("body", b""))
                if state["body_bytes"] > self._body_bytes_max:
                    raise self._too_long()
            return message

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", ()),
                    (REQUEST_ID_HEADER.encode(), request_id.encode()),
                ]
            await send(message)

        path = scope["path"].removeprefix(scope.get("root_path", ""))
        refusal = self._refusal(path, headers)
        if refusal is None:
            await self._app(scope, counted_receive, send_with_id)
            return
        answer = scope["app"].exception_handlers[ApiError]
        response = await answer(Request(scope), refusal)
        await response(scope, receive, send_with_id)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        for door in self._doors:
            if door.leads_to(path):
                refusal = door.refusal(headers.get(b"authorization", b"").decode("latin-1"))
                if refusal is not None:
                    return refusal
        said = headers.get(b"content-length", b"")
        if said.isdigit() and int(said) > self._body_bytes_max:
            return self._too_long()
        return None

    def _too_long(self) -> ApiError:
        return ApiError(
            413,
            f"the body is longer than the {self._body_bytes_max} bytes this server accepts; "
            "shorten the prompt or raise --body-mib-max",
            code="body_too_long",
        )


def body_bytes(http: Request) -> int:
    """How long the body of a request was, as far as it has been read."""
    return int(http.state.body_bytes)


def _request_id(headers: dict[bytes, bytes]) -> str:
    text = headers.get(REQUEST_ID_HEADER.encode(), b"").decode("latin-1")
    return text if _ACCEPTABLE_ID.fullmatch(text) else uuid.uuid4().hex
