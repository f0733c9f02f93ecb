"""What crosses the wire besides an error's class: the delay after which to try again. The rest: transport's tests."""

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from baton.errors import BatonError, InvalidArgumentError, ResourceExhaustedError, UnavailableError
from baton.rpc_status import DETAILS_KEY, encode_error, from_rpc_error

FULL = ResourceExhaustedError("queue is full: try again in 2.5 s", 2.5)


def crossed(error: BatonError) -> BatonError:
    """The error after a way over the wire."""
    code, text, metadata = encode_error(error)
    return from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), text))


def received(metadata: tuple[tuple[str, str | bytes], ...] = (), text: str = "full") -> BatonError:
    """What a refusal with such trailing metadata and text is understood as."""
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    return from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), text))


def test_retry_delay_crosses_the_wire() -> None:
    error = crossed(FULL)
    assert isinstance(error, ResourceExhaustedError)
    assert (str(error), error.retry_after_s) == (str(FULL), 2.5)


def test_retry_delay_is_what_other_clients_expect() -> None:
    code, text, metadata = encode_error(FULL)
    details = dict(metadata)[DETAILS_KEY]
    assert isinstance(details, bytes)
    status = status_pb2.Status.FromString(details)
    assert (status.code, status.message) == (code.value[0], text)
    info = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info) and info.retry_delay.ToMilliseconds() == 2500


def test_no_delay_is_no_delay() -> None:
    error = crossed(ResourceExhaustedError("no free slot"))
    assert isinstance(error, ResourceExhaustedError) and error.retry_after_s is None


def test_other_errors_carry_their_class_only() -> None:
    assert [key for key, _ in encode_error(UnavailableError("gone"))[2]] == ["baton-error"]


@pytest.mark.parametrize("details", [b"\xff\xff", b"", status_pb2.Status(code=8).SerializeToString()])
def test_details_of_others_are_passed_over(details: bytes) -> None:
    error = received(((DETAILS_KEY, details),))
    assert isinstance(error, ResourceExhaustedError) and error.retry_after_s is None


@pytest.mark.parametrize(
    "text",
    [
        "received metadata size exceeds soft limit (9236 vs. 8192); :method:size = 43",
        "CLIENT: Sent message larger than max (17000000 vs. 16777216)",
        "SERVER: Received message larger than max (17000000 vs. 16777216)",
    ],
)
def test_what_grpc_refuses_for_its_size_is_no_full_queue(text: str) -> None:
    assert type(received(text=text)) is InvalidArgumentError
