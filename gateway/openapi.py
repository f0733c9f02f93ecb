"""What the OpenAPI document says of all routes: errors in the shape that they have, and streams. Pure."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """What went wrong, and where."""

    message: str
    type: str
    param: str | None
    """The field of the body that is wrong, if it is one."""
    code: str | None


class ErrorBody(BaseModel):
    """Body of an answer that is an error."""

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
"""What a stream is made of: its schema is that of an event, whose data is JSON, or `[DONE]`."""
_UNUSED = "HTTPValidationError", "ValidationError"

Responses = dict[int | str, dict[str, Any]]
ERRORS: Responses = {status: {"model": ErrorBody, "description": meaning} for status, meaning in _MEANINGS.items()}
"""Answers that any route may give in place of its own."""
STREAMED: Responses = {200: {"description": "The answer, whole or as server-sent events.", "content": _STREAM}}
"""The answer of a route that streams if it is asked to."""


def describe(app: FastAPI) -> None:
    """Let the application's document say what its routes answer: what is wrong with a body is status 400 here."""

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
