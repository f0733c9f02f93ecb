"""Reads JSON bodies, and validates them by their models.

`BodyRoute` is the class of all routes. It checks the caller first, and does not read the bodies of callers that are
refused. Long bodies are parsed and validated in a thread.
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError

from baton.text.bounded_reading import BoundedReading
from gateway.door.held_bodies import HeldBodies
from gateway.errors import FieldNames, UnreadableBodyError
from gateway.parsing.strict_json import read_json
from gateway.streaming import caller_of

_LONG_BYTES = 16 * 1024
"""Number of bytes from which a body is parsed in a thread instead of on the event loop."""

Admit = Callable[[Mapping[str, str]], Awaitable[None]]
"""Function that checks a caller, given by the headers that `caller_of` returns. Raises BatonError if the caller may not
send requests."""


class BodyRoute(APIRoute):
    """Route whose JSON body is read with limits. The application first checks that the caller is permitted
    (`app.state.admit`)."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """Return the function that handles a request: it checks the caller, reads and validates the body, and calls the
        route."""
        answer, field = super().get_route_handler(), self.body_field
        if field is None or field.field_info.annotation is None:
            return answer
        model = TypeAdapter[Any](field.field_info.annotation)
        fields = FieldNames(getattr(field.field_info.annotation, "model_fields", ()))

        async def read_and_answer(request: Request) -> Response:
            admit: Admit = request.app.state.admit
            await admit(caller_of(request, traces=False))
            _check_headers(request)
            request.state.fields = fields
            bodies: HeldBodies = request.app.state.bodies
            return await answer(_Read(request, await bodies.read(request, partial(_parsed, request, model))))

        return read_and_answer


class _Read(Request):
    """Request whose body was already received, parsed and validated."""

    def __init__(self, request: Request, value: object) -> None:
        super().__init__(request.scope, request.receive)
        self._body = b"{}"  # FastAPI only checks that it is not empty
        self._value = value

    async def json(self) -> object:
        """Return the body's value, which was parsed and validated before. Called once: the value is not kept."""
        value, self._value = self._value, None
        return value


async def _parsed(request: Request, model: TypeAdapter[Any], body: bytes) -> object:
    """Return the value of a body. Long bodies are read in a thread."""
    request.state.num_body_bytes = len(body)
    read = partial(_read, body, model)
    reading: BoundedReading = request.app.state.reading
    return await reading.run(len(body), read) if len(body) >= _LONG_BYTES else read()


def _read(body: bytes, model: TypeAdapter[Any]) -> object:
    """Return the value of a body, validated by its model. Raises as `read_json` does, and RequestValidationError."""
    value = read_json(body)
    try:
        return model.validate_python(value)
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)[:1]]
        raise RequestValidationError(found, body=None) from error


def _check_headers(request: Request) -> None:
    """Raise UnreadableBodyError unless the headers declare the body as uncompressed JSON."""
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnreadableBodyError(f"content-type is {given!r:.80}: send JSON, with the header application/json")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise UnreadableBodyError(f"content-encoding is {encoding!r:.80}: send the body as it is, not compressed")
