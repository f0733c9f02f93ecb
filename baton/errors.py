"""Exceptions that Baton raises. Their common base class is BatonError. The attribute `retryable` is True if the same
request may succeed in a new attempt.

These exceptions have causes outside the code. Bugs of Baton raise AssertionError instead. `baton.rpc_status` maps each
class to a gRPC status code. The receiver of the status raises the same class again.
"""

from typing import ClassVar


class BatonError(Exception):
    """Base class of all errors that Baton raises on purpose. The message is one line with the problem, its location and
    the remedy."""

    retryable: ClassVar[bool] = False
    retry_after_s: float | None = None
    """Number of seconds after which the request may be sent again. None if unknown. Transmitted over gRPC as
    google.rpc.RetryInfo."""


class InvalidArgumentError(BatonError):
    """A field of a request is invalid. The message names the field, the value and the remedy."""


class ConfigError(BatonError):
    """A configuration field is invalid. The message names the field, the value and the remedy."""


class ModelError(BatonError):
    """A model cannot be loaded. Examples: the path is wrong, the architecture is not supported, a tensor is missing, or
    a file is truncated."""


class ResourceExhaustedError(BatonError):
    """A resource is exhausted for now: a queue is full, or no slot is free."""

    retryable = True

    def __init__(self, text: str, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class UnauthenticatedError(BatonError):
    """The call does not identify its caller, or its API key is unknown."""


class PermissionDeniedError(BatonError):
    """The caller is known, but is not permitted to make this call."""


class RequestCancelledError(BatonError):
    """The request was cancelled, either by the client or by the orchestrator."""


class DeadlineExceededError(BatonError):
    """The deadline of a request passed before the request ended."""


class NotFoundError(BatonError):
    """The object that a call names does not exist on this server."""


class StalePrefixError(NotFoundError):
    """A prefill job needs cached tokens that are no longer in the prefix store. The job may be retried without these
    cached tokens."""


class UnavailableError(BatonError):
    """A worker or server cannot serve now, because it is starting, draining, or does not exist any more."""

    retryable = True


class StaleTermError(UnavailableError):
    """An orchestrator called a worker after another orchestrator had replaced it. The call changed nothing. Clients
    resume their streams at the new orchestrator."""


class DrainedError(UnavailableError):
    """Operators have drained all groups that could serve the request. The request cannot be served until a group is
    undrained."""

    retryable = False
    retry_after_s = 30.0


class VersionMismatchError(BatonError):
    """Two parts of one cluster run different versions, serve different models, or use different wire formats."""


class LeaseError(BatonError):
    """A lease on a slot is invalid or has ended."""


class StaleStampError(LeaseError):
    """A call used the stamp of an earlier lease. A stamp identifies one lease of a slot. The slot has been freed or
    leased again since. The call changed nothing."""


class LeaseExpiredError(LeaseError):
    """A lease on a slot was not renewed in time. The slot is being freed."""

    retryable = True


class TransferError(BatonError):
    """A piece of transferred KV was rejected, or could not be copied to the device. After a rejection the slot is
    unchanged. After a failed copy the lease ends."""

    retryable = True


class LayoutMismatchError(TransferError):
    """The KV layouts of sender and receiver differ in the model, the number of layers or kv heads, the head dim or the
    dtype."""

    retryable = False


class ByteCountError(TransferError):
    """The number of bytes in a piece of transferred KV does not match its token range."""


class ChecksumError(TransferError):
    """The payload of a piece of transferred KV does not match its checksum."""


class RangeError(TransferError):
    """A piece of transferred KV lies outside the lease, or overlaps an earlier piece with different content."""

    retryable = False


class IncompletePushError(TransferError):
    """A KV transfer cannot be committed, because bytes are missing. The message names the first missing range."""


class ChainError(BatonError):
    """A prefill chain (a group of workers that compute one prompt together) could not finish a job. Another attempt may
    succeed."""

    retryable = True


class NotFiniteError(BatonError):
    """The logits of a sequence contain NaN or plus infinity, so no probabilities of tokens can be computed. Weights or
    KV are damaged, or the model overflows."""

    retryable = True


class LinkBrokenError(ChainError):
    """The connection to a neighbouring rank of a prefill chain broke. The ranks must connect again, which starts a new
    epoch (set of connections)."""


class LinkStalledError(ChainError):
    """A link between two ranks of a prefill chain made no progress within its timeout. The ranks must connect again,
    which starts a new epoch (set of connections)."""


class EpochEndedError(ChainError):
    """A prefill job belongs to an earlier epoch of its chain. An epoch is the time during which the ranks of a chain
    are connected. The connections of the earlier epoch are closed."""


class JobAbortedError(ChainError):
    """A prefill job was aborted by an earlier rank of its chain (the group of workers that compute one prompt
    together). The abort was sent over the link between the ranks."""
