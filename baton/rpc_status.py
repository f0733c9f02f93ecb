"""Conversion between Baton's errors and gRPC statuses. A table maps each error class to a status code. The name of the
class is sent in the trailing metadata of the call, so that the receiver can raise the same error.

Used by servers (`baton.transport.status_interceptor`), and by synchronous and asyncio clients. All functions are pure.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Protocol, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode

from baton import errors
from baton.errors import BatonError, ResourceExhaustedError

ERROR_KEY = "baton-error"
"""Key of the trailing metadata that contains the name of the error's class."""
DETAILS_KEY = "grpc-status-details-bin"
"""Key of the trailing metadata that contains a serialized google.rpc.Status, according to gRPC's conventions."""
MAX_TEXT_CHARS = 1000
"""Maximum number of characters of an error's text. Longer texts are cut, because gRPC drops the whole status if its
metadata exceeds 8 KiB."""

Metadata = tuple[tuple[str, str | bytes], ...]

STATUS_OF: Mapping[type[BatonError], StatusCode] = MappingProxyType(
    {
        errors.BatonError: StatusCode.INTERNAL,
        errors.InvalidArgumentError: StatusCode.INVALID_ARGUMENT,
        errors.ConfigError: StatusCode.FAILED_PRECONDITION,
        errors.ModelError: StatusCode.FAILED_PRECONDITION,
        errors.ResourceExhaustedError: StatusCode.RESOURCE_EXHAUSTED,
        errors.UnauthenticatedError: StatusCode.UNAUTHENTICATED,
        errors.PermissionDeniedError: StatusCode.PERMISSION_DENIED,
        errors.RequestCancelledError: StatusCode.CANCELLED,
        errors.DeadlineExceededError: StatusCode.DEADLINE_EXCEEDED,
        errors.NotFoundError: StatusCode.NOT_FOUND,
        errors.StalePrefixError: StatusCode.NOT_FOUND,
        errors.UnavailableError: StatusCode.UNAVAILABLE,
        errors.DrainedError: StatusCode.UNAVAILABLE,
        errors.StaleTermError: StatusCode.UNAVAILABLE,
        errors.VersionMismatchError: StatusCode.FAILED_PRECONDITION,
        errors.LeaseError: StatusCode.FAILED_PRECONDITION,
        errors.StaleStampError: StatusCode.FAILED_PRECONDITION,
        errors.LeaseExpiredError: StatusCode.ABORTED,
        errors.TransferError: StatusCode.ABORTED,
        errors.LayoutMismatchError: StatusCode.FAILED_PRECONDITION,
        errors.ByteCountError: StatusCode.DATA_LOSS,
        errors.ChecksumError: StatusCode.DATA_LOSS,
        errors.RangeError: StatusCode.OUT_OF_RANGE,
        errors.IncompletePushError: StatusCode.ABORTED,
        errors.ChainError: StatusCode.ABORTED,
        errors.NotFiniteError: StatusCode.ABORTED,
        errors.LinkBrokenError: StatusCode.ABORTED,
        errors.LinkStalledError: StatusCode.ABORTED,
        errors.EpochEndedError: StatusCode.ABORTED,
        errors.JobAbortedError: StatusCode.ABORTED,
    }
)

_CLASS_OF_NAME: Mapping[str, type[BatonError]] = MappingProxyType({error.__name__: error for error in STATUS_OF})

_CLASS_OF_STATUS: Mapping[StatusCode, type[BatonError]] = MappingProxyType(
    {
        StatusCode.UNAVAILABLE: errors.UnavailableError,
        StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceededError,
        StatusCode.CANCELLED: errors.RequestCancelledError,
        StatusCode.RESOURCE_EXHAUSTED: errors.ResourceExhaustedError,
        StatusCode.INVALID_ARGUMENT: errors.InvalidArgumentError,
        StatusCode.UNAUTHENTICATED: errors.UnauthenticatedError,
        StatusCode.PERMISSION_DENIED: errors.PermissionDeniedError,
        StatusCode.UNIMPLEMENTED: errors.VersionMismatchError,
    }
)
"""Error class for each status code that gRPC generates itself, for example when a server cannot be reached. All other
codes are converted to BatonError, which is not retried."""
_TOO_LARGE = re.compile("message larger than max|metadata size exceeds")
"""Pattern for the texts with which gRPC rejects a message or metadata that is too large. The status code is
RESOURCE_EXHAUSTED in this case, although a retry cannot succeed."""


def table_class(error: BatonError) -> type[BatonError]:
    """Return the error's class if it is a key of STATUS_OF. Otherwise return its nearest base class that is a key."""
    return next(cast(type[BatonError], base) for base in type(error).__mro__ if base in STATUS_OF)


def encode_error(error: BatonError) -> tuple[StatusCode, str, Metadata]:
    """Convert an error to the status code, text and trailing metadata with which gRPC sends it."""
    row = table_class(error)
    code, text = STATUS_OF[row], str(error)[:MAX_TEXT_CHARS]
    metadata: Metadata = ((ERROR_KEY, row.__name__),)
    if error.retry_after_s is not None:
        status = status_pb2.Status(code=code.value[0], message=text)
        delay = error_details_pb2.RetryInfo()
        delay.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        status.details.add().Pack(delay)
        metadata += ((DETAILS_KEY, status.SerializeToString()),)
    return code, text, metadata


def name_of(error: BatonError) -> str:
    """Return the name of the error's class for sending it to another process. If the class is not in STATUS_OF, the
    name of its nearest base class in STATUS_OF is returned."""
    return table_class(error).__name__


def error_of_name(name: str, text: str, retry_after_s: float | None = None) -> BatonError:
    """Create an error from a class name that `name_of` has returned. For an unknown name, a BatonError is created.
    `retry_after_s` is used only for ResourceExhaustedError."""
    named = _CLASS_OF_NAME.get(name, BatonError)
    return ResourceExhaustedError(text, retry_after_s) if named is ResourceExhaustedError else named(text)


def from_rpc_error(error: grpc.RpcError) -> BatonError:
    """Convert a gRPC error to a BatonError. If the server raised a BatonError, the result has the same class. If gRPC
    itself generated the status, the class is determined by the status code."""
    status = cast(_Status, error)
    metadata = dict(status.trailing_metadata() or ())
    text = status.details() or "no details"
    named = _CLASS_OF_NAME.get(str(metadata.get(ERROR_KEY)))
    if named is None:
        named = (
            errors.InvalidArgumentError if _TOO_LARGE.search(text) else _CLASS_OF_STATUS.get(status.code(), BatonError)
        )
        text = f"{status.code().name}: {text}"
    if named is ResourceExhaustedError:
        return ResourceExhaustedError(text, _retry_after_s(metadata.get(DETAILS_KEY, b"")))
    return named(text)


@contextmanager
def translate_rpc_errors() -> Iterator[None]:
    """Return a context manager that converts a gRPC error raised in its block to the corresponding BatonError."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


class _Status(Protocol):
    """Protocol with the methods of grpc's error classes that this module calls. The synchronous and the asyncio class
    both have these methods, but their common base class does not declare them."""

    def code(self) -> StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


def _retry_after_s(details: str | bytes) -> float | None:
    if not isinstance(details, bytes):
        return None
    try:
        packed = status_pb2.Status.FromString(details).details
        delay = error_details_pb2.RetryInfo()
        return next((delay.retry_delay.ToNanoseconds() / 1e9 for each in packed if each.Unpack(delay)), None)
    except DecodeError:  # not made by Baton: a proxy's answer still has its status
        return None
