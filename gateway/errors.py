"""Errors as OpenAI's API writes them: a status, and `{"error": {"message", "type", "param", "code"}}`. Pure."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from baton import errors
from baton.errors import BatonError

CLIENT_GONE = 499
"""Status of a request whose client disconnected. It appears only in metrics."""


class BodyTooLargeError(errors.InvalidArgumentError):
    """The body of a request has more bytes than any request may have."""


class UnreadableBodyError(errors.InvalidArgumentError):
    """According to its headers, the body of a request is not plain JSON."""


class ContextTooLongError(errors.InvalidArgumentError):
    """A prompt, alone or with the requested output, has more tokens than the model's context. Clients recognize this
    error by its code, and may shorten the conversation."""


class HeadersTooLongError(errors.InvalidArgumentError):
    """The request's line and headers, or its headers that identify the caller, exceed the limit on their bytes."""


class WrongHostError(errors.PermissionDeniedError):
    """The request's header Host names a host that is not allowed."""


class UnknownResponseError(errors.NotFoundError):
    """The requested response is not stored."""


_STATUSES: tuple[tuple[type[BatonError], int, str, str | None], ...] = (
    (BodyTooLargeError, 413, "invalid_request_error", None),
    (UnreadableBodyError, 415, "invalid_request_error", None),
    (HeadersTooLongError, 431, "invalid_request_error", None),
    (ContextTooLongError, 400, "invalid_request_error", "context_length_exceeded"),
    (errors.InvalidArgumentError, 400, "invalid_request_error", None),
    (errors.UnauthenticatedError, 401, "authentication_error", "invalid_api_key"),
    (WrongHostError, 421, "invalid_request_error", None),
    (errors.PermissionDeniedError, 403, "permission_error", None),
    (UnknownResponseError, 404, "invalid_request_error", None),
    (errors.NotFoundError, 404, "not_found_error", "model_not_found"),
    (errors.DeadlineExceededError, 408, "timeout_error", None),
    (errors.ResourceExhaustedError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (errors.RequestCancelledError, CLIENT_GONE, "cancelled_error", None),
    (errors.UnavailableError, 503, "service_unavailable_error", None),
    (errors.BatonError, 500, "server_error", None),
)
"""Class, status, type and code of errors. The first class that an error is an instance of is used."""
_FIELD = re.compile(r"[a-z_]+")


@dataclass(frozen=True)
class FieldNames:
    """Fields of a request, with the names that its client uses."""

    fields: Collection[str] = ()
    """Fields that an error may name as `param`."""
    renamed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Client's names of fields, by the names that errors use. An error's text begins with the field's name, or has it
    after `sampling.`."""

    def text(self, error: BatonError) -> str:
        """Return an error's text with the client's names of fields."""
        known = "|".join(map(re.escape, sorted(self.renamed, key=len, reverse=True)))
        ours = rf"(?:^(?:sampling\.)?|(?<![\w/'\"])sampling\.)(?:({known})(?!\w))?"
        return re.sub(ours, lambda found: self.renamed.get(found[1] or "", ""), str(error))


NO_FIELDS = FieldNames()


def status_of(error: BatonError) -> int:
    """Return the HTTP status of an error."""
    return next(status for kind, status, _, _ in _STATUSES if isinstance(error, kind))


def error_body(error: BatonError, names: FieldNames = NO_FIELDS) -> dict[str, Any]:
    """Return the body of an error answer, in which fields have the client's names. If the error's text begins with a
    field, this field is `param`."""
    type_, code = next((type_, code) for kind, _, type_, code in _STATUSES if isinstance(error, kind))
    text = names.text(error)
    begun = _FIELD.match(text)
    param = begun[0] if begun is not None and begun[0] in names.fields else None
    return {"error": {"message": text, "type": type_, "param": param, "code": code}}


def error_headers(error: BatonError) -> dict[str, str]:
    """Return the headers of an error answer: Retry-After if the delay in seconds is known, and WWW-Authenticate if the
    API key is missing."""
    if error.retry_after_s is not None:
        return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    return {"www-authenticate": "Bearer"} if isinstance(error, errors.UnauthenticatedError) else {}
