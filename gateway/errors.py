"""Errors in the format of OpenAI's API: an HTTP status, and `{"error": {"message", "type", "param", "code"}}`. The
functions have no side effects."""

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
    """Raised if the body of a request exceeds the limit in bytes or in number of values."""


class UnreadableBodyError(errors.InvalidArgumentError):
    """Raised if the headers of a request declare a body that is not plain JSON."""


class UnsupportedFieldError(errors.InvalidArgumentError):
    """Raised if a body has a field that its path does not support. The error's text begins with the client's name of
    the field."""


class ContextTooLongError(errors.InvalidArgumentError):
    """Raised if a prompt, alone or with the requested output, has more tokens than the model's context. Clients
    recognize this error by its code, and may shorten the conversation."""


class HeadersTooLongError(errors.InvalidArgumentError):
    """Raised if a request's line and headers together, or only the headers that identify the caller, exceed their limit
    in bytes."""


class WrongHostError(errors.PermissionDeniedError):
    """Raised if the header Host of a request names a host that is not allowed."""


class UnknownResponseError(errors.NotFoundError):
    """Raised if a client requests a response that is not stored."""


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
"""HTTP status, type and code of errors, by class. For an error, the first entry is used whose class is the error's
class or a base class of it."""
_FIELD = re.compile(r"[a-z_]+")


@dataclass(frozen=True)
class FieldNames:
    """Fields of a request, and the names that the client uses for them."""

    fields: Collection[str] = ()
    """Names of fields that may be the value of `param` in an error."""
    renamed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Mapping from the names of fields in Baton's errors to the names that the client uses. A name is replaced if it
    begins the error's text, or if it follows the prefix `sampling.`, which is removed."""

    def text(self, error: BatonError) -> str:
        """Return the text of `error`, with the names of fields replaced by those that the client uses."""
        if isinstance(error, UnsupportedFieldError):
            return str(error)
        known = "|".join(map(re.escape, sorted(self.renamed, key=len, reverse=True)))
        ours = rf"(?:^(?:sampling\.)?|(?<![\w/'\"])sampling\.)(?:({known})(?!\w))?"
        return re.sub(ours, lambda found: self.renamed.get(found[1] or "", ""), str(error))


NO_FIELDS = FieldNames()


def status_of(error: BatonError) -> int:
    """Return the HTTP status of an error."""
    return next(status for kind, status, _, _ in _STATUSES if isinstance(error, kind))


def error_body(error: BatonError, names: FieldNames = NO_FIELDS) -> dict[str, Any]:
    """Return the JSON body of an error answer. In its text, fields of the request have the names that the client uses
    (`names`). If the text begins with the name of a field, this name is also the value of `param`."""
    type_, code = next((type_, code) for kind, _, type_, code in _STATUSES if isinstance(error, kind))
    text = names.text(error)
    begun = _FIELD.match(text)
    param = begun[0] if begun is not None and begun[0] in names.fields else None
    return {"error": {"message": text, "type": type_, "param": param, "code": code}}


def error_headers(error: BatonError) -> dict[str, str]:
    """Return additional HTTP headers for an error. Retry-After is set if the delay in seconds is known.
    WWW-Authenticate is set if the API key is missing or invalid."""
    if error.retry_after_s is not None:
        return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    return {"www-authenticate": "Bearer"} if isinstance(error, errors.UnauthenticatedError) else {}
