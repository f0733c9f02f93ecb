"""Parts of the OpenAPI document that all routes share: the format of errors, and streams."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """Message, type and code of an error, and the field that it concerns."""

    message: str
    type: str
    param: str | None
    """Name of the body's field that is wrong. None if the error does not concern a field."""
    code: str | None


class ErrorBody(BaseModel):
    """JSON body of an error answer."""

    error: ErrorDetail


_MEANINGS = {
    400: "A field is wrong; `param` names it.",
    401: "No key, or an unknown one.",
    403: "The key does not permit this request.",
    404: "Another model, or a response that is not kept.",
    408: "The request's deadline has passed.",
    413: "The body is too long.",
    415: "The body is not JSON, or compressed.",
    421: "The request names a host that is not allowed.",
    429: "The queue is full; `retry-after` says when there may be room.",
    431: "The headers are too long.",
    500: "A defect of the server.",
    503: "The server is away, or all its groups are drained.",
}
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_STREAM: dict[str, Any] = {"text/event-stream": {"schema": _EVENT}}
"""OpenAPI content type of a stream. The schema describes one event, whose data is JSON or `[DONE]`."""
_UNUSED = "HTTPValidationError", "ValidationError"

Responses = dict[int | str, dict[str, Any]]
ERRORS: Responses = {status: {"model": ErrorBody, "description": meaning} for status, meaning in _MEANINGS.items()}
"""Error answers that any route may return."""
STREAMED: Responses = {200: {"description": "The answer, whole or as server-sent events.", "content": _STREAM}}
"""OpenAPI description of the successful answer of a route that can stream."""


def describe(app: FastAPI) -> None:
    """Correct the OpenAPI document of the application. FastAPI declares status 422 for an invalid body, but this
    application returns 400."""

    def document() -> Mapping[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for path in made["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for name in _UNUSED:
                made["components"]["schemas"].pop(name, None)
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign, assignment]
