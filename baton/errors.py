"""The one exception tree. `retryable` says whether the same request may succeed as a new attempt, unchanged.

These errors have causes outside the code; bugs of Baton itself are asserts. `baton.rpc_status` maps the tree to gRPC
status codes in one table, and rebuilds the same class on the other side.
"""

from typing import ClassVar


class BatonError(Exception):
    """Base of all errors that Baton raises on purpose. Its text is one line: what, where, remedy."""

    retryable: ClassVar[bool] = False
    retry_after_s: float | None = None
    """Seconds after which the request may be sent again; None if unknown. Crosses the wire as google.rpc.RetryInfo."""


class InvalidArgumentError(BatonError):
    """A request's field is out of its limits; the text names the field, the value and the remedy."""


class ConfigError(BatonError):
    """A configuration field is wrong; the text names the field, the value and the remedy."""


class ModelError(BatonError):
    """A model cannot be loaded: bad path, unsupported architecture, missing tensor, truncated file."""


class ResourceExhaustedError(BatonError):
    """There is no room now: a queue is full, or no slot is free."""

    retryable = True

    def __init__(self, text: str, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class UnauthenticatedError(BatonError):
    """The call does not identify its caller, or does so by an unknown key."""


class PermissionDeniedError(BatonError):
    """The call identifies its caller, and that caller may not make it."""


class RequestCancelledError(BatonError):
    """The request was cancelled, by the client or by the controller on its behalf."""


class DeadlineExceededError(BatonError):
    """The request's deadline passed before its end."""


class NotFoundError(BatonError):
    """The thing that a call names does not exist on this server."""


class StalePrefixError(NotFoundError):
    """A job was to begin after cached tokens that are no longer in the store; it may be retried without them."""


class UnavailableError(BatonError):
    """A worker cannot serve now: starting, draining, or gone."""

    retryable = True


class DrainedError(UnavailableError):
    """Operators have drained all groups that could serve the request. It is not served before they undo that."""

    retryable = False
    retry_after_s = 30.0


class VersionMismatchError(BatonError):
    """Two parts of one cluster run different versions, models or wire contracts."""


class LeaseError(BatonError):
    """A claim on a slot does not hold (any more)."""


class StaleStampError(LeaseError):
    """The slot was freed or leased again after this stamp was given; nothing was changed."""


class LeaseExpiredError(LeaseError):
    """The lease was not renewed in time; its slot is being freed."""

    retryable = True


class TransferError(BatonError):
    """A piece of KV was refused, which leaves the slot unchanged, or could not be copied to the device, which ends the
    lease."""

    retryable = True


class LayoutMismatchError(TransferError):
    """The KV layouts of sender and receiver differ: model, layers, kv heads, head dim or dtype."""

    retryable = False


class ByteCountError(TransferError):
    """The length of a piece's payload does not match its token range."""


class ChecksumError(TransferError):
    """A piece's payload does not match its checksum."""


class RangeError(TransferError):
    """A piece lies outside the lease, or overlaps an earlier piece without being equal to it."""

    retryable = False


class IncompletePushError(TransferError):
    """A commit was requested while bytes are missing; the text names the first missing range."""


class ChainError(BatonError):
    """A prefill chain could not finish a job; another attempt may."""

    retryable = True


class NotFiniteError(BatonError):
    """The logits of a sequence are NaN or infinite, so that it has no next token: weights or KV are damaged, or the
    model overflows."""

    retryable = True


class LinkBrokenError(ChainError):
    """A neighbour's connection broke; the epoch is over."""


class LinkStalledError(ChainError):
    """A link made no progress within its bound; the epoch is over."""


class EpochEndedError(ChainError):
    """The job belongs to an epoch whose links have ended."""


class JobAbortedError(ChainError):
    """An earlier rank aborted the job, by a message on the chain's link."""
