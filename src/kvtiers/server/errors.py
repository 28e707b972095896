"""Errors on the wire, in the OpenAI shape: `{"error": {message, type, param, code}}`.

One class for everything a route refuses, one table for the response documentation, and the
handlers that turn validation errors and unexpected exceptions into the same shape. A message says
what was asked, the limit and the way out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

log = logging.getLogger("kvtiers.server")

_PROBLEMS_TOLD_MAX = 8
"""A body can be wrong in a thousand places; its answer must not be as long."""

_TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
}


class ErrorDetail(BaseModel):
    """What went wrong: for people (`message`), and for programs (`type`, `param`, `code`)."""

    model_config = ConfigDict(extra="forbid")

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every response that is not a success."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorDetail


class ApiError(HTTPException):
    """A request that is refused or failed, with the status and the body it is answered with.

    An `HTTPException`, because FastAPI lets only those pass while it reads a body.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(status, message)
        self.body = error_body(status, message, code=code, param=param)


def error_body(
    status: int, message: str, *, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """The JSON body for `status`, as plain data."""
    kind = _TYPE_OF_STATUS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "5"},
}

_DESCRIPTIONS = {
    400: "The request is not valid; the message says which part, the limit and the way out",
    401: "The key is missing or wrong",
    403: "This key may not do that",
    404: "No such model, pin or page of the API",
    409: "The state of the cache does not allow this now",
    413: "The body is longer than the server accepts",
    429: "Too many requests are waiting",
    500: "The forward pass failed; nothing of it was published",
    503: "The server is starting or draining",
}


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses=` of a route that can answer with these error statuses."""
    return {
        status: {"model": ErrorBody, "description": _DESCRIPTIONS[status]} for status in statuses
    }


def install_handlers(app: FastAPI) -> None:
    """Give every failure of `app` the OpenAI shape."""

    async def on_api_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return JSONResponse(error.body, error.status_code, _HEADERS.get(error.status_code))

    async def on_invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return JSONResponse(_explain(error.errors()), 400)

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code in (404, 405):  # the router's own: no route raises them without a body
            message = f"{message}: {request.method} {request.url.path}; /docs lists what there is"
        return JSONResponse(
            error_body(error.status_code, message), error.status_code, error.headers
        )

    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        log.error("unhandled error in %s %s", request.method, request.url.path, exc_info=error)
        message = f"internal error ({type(error).__name__}); the server log has the traceback"
        return JSONResponse(error_body(500, message, code="internal_error"), 500)

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_bug)


def _explain(problems: Sequence[Any]) -> dict[str, Any]:
    """One message for all problems pydantic found; `param` and `code` are the first one's.

    A union reports a problem for each of its branches. Per parameter only the most telling one is
    kept: one of ours, else one about the value, else one that says which type was expected.
    """
    best: dict[str, Any] = {}
    for problem in problems:
        # What is no JSON has no members yet: its location is a position in the text.
        param = "" if problem["type"] == "json_invalid" else _path(problem["loc"])
        if param not in best or _telling(problem) > _telling(best[param]):
            best[param] = problem
    explained = [
        (param, *_sentence(problem, param))
        for param, problem in best.items()
        if _telling(problem) or not _is_outdone(param, best)
    ]
    first_param, first_code, _ = explained[0]
    sentences = [sentence for _, _, sentence in explained[:_PROBLEMS_TOLD_MAX]]
    if len(explained) > len(sentences):
        sentences.append(f"and {len(explained) - len(sentences)} more")
    message = "; ".join(sentences)
    return error_body(400, message, code=first_code, param=first_param or None)


def _is_outdone(param: str, best: dict[str, Any]) -> bool:
    """Whether something is known within `param`, or something more telling about its whole."""
    return any(
        other.startswith(f"{param}.") or (param.startswith(f"{other}.") and _telling(problem))
        for other, problem in best.items()
    )


def _telling(problem: Any) -> int:
    if problem["type"] in _OWN_PROBLEMS:
        return 2
    return 0 if problem["type"].endswith("_type") else 1


def _sentence(problem: Any, param: str) -> tuple[str, str]:
    kind, message = problem["type"], problem["msg"]
    if kind == "json_invalid":
        where = problem.get("ctx", {}).get("error", "not JSON")
        position = problem["loc"][-1]
        return "malformed_json", f"the body is not valid JSON at character {position}: {where}"
    if kind == "extra_forbidden":
        return "unsupported_parameter", f"'{param}' is not a parameter this server supports"
    if kind == "missing" and not param:
        return "missing_body", "the request has no JSON body; send Content-Type: application/json"
    if kind == "missing":
        return "missing_parameter", f"'{param}' is required"
    if kind in _OWN_PROBLEMS:
        return kind, message
    if not param:
        return "invalid_body", "the body is not a JSON object; send Content-Type: application/json"
    message = message.replace(" after validation", "")
    return "invalid_value", f"'{param}': {message[:1].lower()}{message[1:]}"


_OWN_PROBLEMS = ("unsupported_parameter", "unsupported_content")

_NOT_NAMES = ("body", "query", "path", "header", "str", "int")
"""What pydantic puts into a location beside the names of members: where, and which branch."""


def _path(location: Sequence[Any]) -> str:
    """`messages.0.content` from pydantic's location, without the branches of unions."""
    parts = [str(part) for part in location if part not in _NOT_NAMES]
    return ".".join(part for part in parts if part.isidentifier() or part.isdigit())
