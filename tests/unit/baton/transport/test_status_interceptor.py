import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import pytest

from baton import __version__, errors
from baton.channel_options import USER_AGENT
from baton.errors import BatonError, DeadlineExceededError, RequestCancelledError, StaleStampError, UnavailableError
from baton.rpc_status import MAX_TEXT_CHARS, STATUS_OF, encode_error
from baton.transport import status_interceptor
from baton.transport.channel import make_channel
from baton.transport.status_interceptor import VERSIONED, SentStatus, from_rpc_error, translate_rpc_errors
from tests.support.wire.rpc import STREAM, UPLOAD, Context, Service, call_unary, connected, serving_methods

pytestmark = pytest.mark.integration


def all_errors(base: type[BatonError] = BatonError) -> set[type[BatonError]]:
    """`base` and all its subclasses of baton.errors."""
    found = {base}
    for error in base.__subclasses__():
        if error.__module__ == errors.__name__:
            found |= all_errors(error)
    return found


def name_of(error: type[BatonError]) -> str:
    return error.__name__


class Failing(Service):
    """Fails with `error`: at once, after one reply, after one request."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def unary(self, request: bytes, context: Context) -> bytes:
        raise self._error

    async def stream(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        yield b"one"
        raise self._error

    async def upload(self, requests: AsyncIterator[bytes], context: Context) -> bytes:
        async for _ in requests:
            raise self._error
        return b""


async def raised_by(error: Exception) -> BatonError:
    """What a client of a method that raises `error` catches."""
    async with connected(Failing(error)) as channel:
        with pytest.raises(BatonError) as caught, translate_rpc_errors():
            await call_unary(channel)
    return caught.value


def test_table_covers_every_error() -> None:
    assert StaleStampError in all_errors()
    assert set(STATUS_OF) == all_errors()


def test_no_error_is_mapped_to_success() -> None:
    assert grpc.StatusCode.OK not in STATUS_OF.values()


EVERY_ERROR = sorted(all_errors(), key=name_of)


@pytest.mark.parametrize("error", EVERY_ERROR, ids=name_of)
async def test_error_crosses_the_wire_as_itself(error: type[BatonError]) -> None:
    caught = await raised_by(error("slot 3: what, where, remedy"))
    assert (type(caught), str(caught)) == (error, "slot 3: what, where, remedy")


async def test_status_is_that_of_the_table() -> None:
    async with connected(Failing(errors.RangeError("x"))) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call_unary(channel)
    assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE


async def test_error_after_a_reply_ends_the_stream() -> None:
    async with connected(Failing(StaleStampError("x"))) as channel:
        call = channel.unary_stream(STREAM, bytes, bytes)(b"")
        assert await call.read() == b"one"
        with pytest.raises(StaleStampError), translate_rpc_errors():
            await call.read()


async def test_error_ends_an_upload() -> None:
    async with connected(Failing(StaleStampError("x"))) as channel:
        with pytest.raises(StaleStampError), translate_rpc_errors():
            await channel.stream_unary(UPLOAD, bytes, bytes)(iter([b"one", b"two"]))


async def test_error_unknown_to_the_table_crosses_as_its_base() -> None:
    class OneOfOurOwnError(errors.LeaseError):
        pass

    assert type(await raised_by(OneOfOurOwnError("x"))) is errors.LeaseError


async def test_long_text_is_cut() -> None:
    assert str(await raised_by(UnavailableError("x" * 100_000))) == "x" * MAX_TEXT_CHARS


async def test_text_may_be_unicode_and_have_lines() -> None:
    assert str(await raised_by(UnavailableError("caf\u00e9\nline 2"))) == "caf\u00e9\nline 2"


async def test_bug_is_a_terse_internal_error_and_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "baton.transport.status_interceptor"):
        caught = await raised_by(KeyError("secret detail"))
    assert type(caught) is BatonError
    assert "internal error in /test.Service/Unary" in str(caught)
    assert "secret" not in str(caught)
    assert "KeyError: 'secret detail'" in caplog.text


async def test_servicer_may_abort_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    class Aborting(Service):
        async def unary(self, request: bytes, context: Context) -> bytes:
            await context.abort(*encode_error(StaleStampError("mine")))

    async with connected(Aborting()) as channel:
        with pytest.raises(StaleStampError, match="mine"), translate_rpc_errors():
            await call_unary(channel)
    assert "failed" not in caplog.text


async def test_a_handler_does_not_wait_for_a_caller_that_holds_its_status_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        async def abort(self, *status: object) -> None:
            await asyncio.Event().wait()

    async def failing(request: bytes, context: object) -> bytes:
        raise StaleStampError("not read")

    monkeypatch.setattr(status_interceptor, "_ABORT_S", 0.0)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(status_interceptor._guard(failing, "/test.Service/Unary")(b"", Full()), 60)


async def test_streaming_servicer_is_closed_when_its_client_cancels() -> None:
    closed = asyncio.Event()

    class Endless(Service):
        async def stream(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
            try:
                yield b"one"
                await asyncio.Event().wait()
            finally:
                closed.set()

    async with connected(Endless()) as channel:
        call = channel.unary_stream(STREAM, bytes, bytes)(b"")
        assert await call.read() == b"one"
        call.cancel()
        await asyncio.wait_for(closed.wait(), 60)


async def test_error_of_a_cancelled_call_is_nobodys(caplog: pytest.LogCaptureFixture) -> None:
    """A handler that answers its cancellation with an error finds the call gone; the server serves on."""
    entered, left = asyncio.Event(), asyncio.Event()

    class Late(Service):
        async def unary(self, request: bytes, context: Context) -> bytes:
            if request == b"well":
                return request
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                left.set()
                raise StaleStampError("too late")

    async with connected(Late()) as channel:
        call = asyncio.create_task(call_unary(channel))
        await asyncio.wait_for(entered.wait(), 60)
        call.cancel()
        await asyncio.wait_for(left.wait(), 60)
        assert await call_unary(channel, b"well") == b"well"


@pytest.mark.parametrize("fails", ["early", "late"])
async def test_sent_status_outlives_a_failed_write(fails: str) -> None:
    ended = asyncio.Event()
    async with connected(Failing(StaleStampError("x"))) as channel:
        call = channel.stream_unary(UPLOAD, bytes, bytes)()
        sent = SentStatus(call)
        call.add_done_callback(lambda _: ended.set())
        await call.write(b"one")
        if fails == "late":
            await asyncio.wait_for(ended.wait(), 60)
        call._cython_call.set_internal_error(fails)  # type: ignore[attr-defined]  # as grpc does for such a write
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
    assert type(from_rpc_error(sent.of(caught.value))) is StaleStampError


async def test_unreachable_server_is_unavailable() -> None:
    async with make_channel("127.0.0.1:1") as channel:
        with pytest.raises(UnavailableError), translate_rpc_errors():
            await call_unary(channel)


async def test_passed_deadline_is_deadline_exceeded() -> None:
    class Slow(Service):
        async def unary(self, request: bytes, context: Context) -> bytes:
            await asyncio.Event().wait()
            return b""

    async with connected(Slow()) as channel:
        with pytest.raises(DeadlineExceededError), translate_rpc_errors():
            await call_unary(channel, timeout_s=0.05)


async def test_unknown_method_is_a_version_mismatch() -> None:
    async with connected(Service()) as channel:
        with pytest.raises(errors.VersionMismatchError), translate_rpc_errors():
            await channel.unary_unary("/test.Service/Newer", bytes, bytes)(b"")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, UnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceededError),
        (grpc.StatusCode.CANCELLED, RequestCancelledError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.ResourceExhaustedError),
        (grpc.StatusCode.UNKNOWN, BatonError),
    ],
)
def test_status_without_a_name_is_understood(code: grpc.StatusCode, expected: type[BatonError]) -> None:
    error = from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "why"))
    assert (type(error), str(error)) == (expected, f"{code.name}: why")


def test_unknown_name_falls_back_to_the_status() -> None:
    metadata = grpc.aio.Metadata(("baton-error", "NewerError"))
    error = from_rpc_error(grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), metadata, "why"))
    assert type(error) is UnavailableError


def test_other_exceptions_pass_through() -> None:
    with pytest.raises(KeyError), translate_rpc_errors():
        raise KeyError


def test_translated_error_keeps_its_cause() -> None:
    rpc_error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
    with pytest.raises(UnavailableError) as caught, translate_rpc_errors():
        raise rpc_error
    assert caught.value.__cause__ is rpc_error


STATUS = "/baton.v1.GenerationGroup/GetStatus"


async def asked_by(agent: str) -> bytes:
    """What a caller with this user agent gets from a method for callers of this version; its own request."""

    async def answer(request: bytes, context: Context) -> bytes:
        return request

    options = (("grpc.primary_user_agent", agent),)
    async with (
        serving_methods("baton.v1.GenerationGroup", {"GetStatus": grpc.unary_unary_rpc_method_handler(answer)}) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel,
    ):
        with translate_rpc_errors():
            return await channel.unary_unary(STATUS, bytes, bytes)(b"asked")


@pytest.mark.parametrize(
    ("agent", "has"),
    [
        ("", "does not say its version of Baton"),
        ("curl/8.0", "does not say its version of Baton"),
        ("baton/0.1.0", "has Baton 0.1.0"),
    ],
)
async def test_a_caller_of_another_version_is_refused_in_one_line(agent: str, has: str) -> None:
    with pytest.raises(errors.VersionMismatchError) as caught:
        await asked_by(agent)
    sides = f"the caller of {STATUS} {has}, and this side has {__version__}"
    assert str(caught.value) == f"{sides}: run one version on both sides"


async def test_callers_whose_version_differs_in_its_last_numbers_are_served() -> None:
    major, minor, *_ = __version__.split(".")
    assert await asked_by(USER_AGENT) == await asked_by(f"baton/{major}.{minor}.99") == b"asked"


async def test_what_clients_generate_with_is_open_to_all_versions() -> None:
    assert not [name for name in ("Generate", "GetModel") if f"/baton.v1.Orchestrator/{name}".startswith(VERSIONED)]
