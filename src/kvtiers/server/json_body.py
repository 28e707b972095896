"""How bodies become data: by orjson, which takes what the JSON standard allows and nothing else.

Python's own parser lets through what no other part can handle: a lone surrogate (`"\\ud800"`),
which no tokenizer takes and which cannot be written back in an error message, and `NaN`. Here they
are malformed JSON, told as such with the position, before any route sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute


class _StandardJsonRequest(Request):
    async def json(self) -> Any:
        return orjson.loads(await self.body())


class JsonRoute(APIRoute):
    """A route whose body is read as standard JSON. For `APIRouter(route_class=...)`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(_StandardJsonRequest(request.scope, request.receive))

        return handler
