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
"""Status of a request whose client left. It appears only in metrics."""


class BodyTooLargeError(errors.InvalidArgumentError):
    """The body of a request has more bytes than any request may have."""


class UnreadableBodyError(errors.InvalidArgumentError):
    """The body of a request is not JSON as it is, by what its headers say."""


class ContextTooLongError(errors.InvalidArgumentError):
    """A prompt, alone or with the output that is asked for, has more tokens than the model takes. Clients know this
    error by its code, and may shorten the conversation."""


class HeadersTooLongError(errors.InvalidArgumentError):
    """The request's line and headers, or its headers that identify the caller, exceed the limit on their bytes."""


class WrongHostError(errors.PermissionDeniedError):
    """The request names a host that the gateway does not answer for."""


class UnknownResponseError(errors.NotFoundError):
    """The requested response is not kept."""


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
"""Class, status, type and code; the first class that an error belongs to counts."""
_FIELD = re.compile(r"[a-z_]+")


@dataclass(frozen=True)
class FieldNames:
    """The fields that a request may have, by the names that its client knows."""

    fields: Collection[str] = ()
    """Fields that an error may name as `param`."""
    renamed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Names at the start of errors, or after `sampling.`, with the client's names of these fields."""

    def text(self, error: BatonError) -> str:
        """Return an error's text with the client's names."""
        known = "|".join(map(re.escape, sorted(self.renamed, key=len, reverse=True)))
        ours = rf"(?:^(?:sampling\.)?|(?<![\w/'\"])sampling\.)(?:({known})(?!\w))?"
        return re.sub(ours, lambda found: self.renamed.get(found[1] or "", ""), str(error))


NO_FIELDS = FieldNames()


def status_of(error: BatonError) -> int:
    """Return the HTTP status of an error."""
    return next(status for kind, status, _, _ in _STATUSES if isinstance(error, kind))


def error_body(error: BatonError, names: FieldNames = NO_FIELDS) -> dict[str, Any]:
    """Return the body that says what went wrong, with the names that the client has for the request's fields. The one
    with which the error's text begins is its `param`."""
    type_, code = next((type_, code) for kind, _, type_, code in _STATUSES if isinstance(error, kind))
    text = names.text(error)
    begun = _FIELD.match(text)
    param = begun[0] if begun is not None and begun[0] in names.fields else None
    return {"error": {"message": text, "type": type_, "param": param, "code": code}}


def error_headers(error: BatonError) -> dict[str, str]:
    """Return the headers of an answer with this error: after how many seconds another attempt may be made, if that is
    known, and how to send a key, if it is missing."""
    if error.retry_after_s is not None:
        return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    return {"www-authenticate": "Bearer"} if isinstance(error, errors.UnauthenticatedError) else {}
