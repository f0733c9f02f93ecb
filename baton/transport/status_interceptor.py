"""Conversion of errors to gRPC statuses in asyncio servers, and back to errors in their callers. `baton.rpc_status` has
the table of errors and statuses.

Servers made by `baton.transport.channel.make_server` use StatusInterceptor, so a servicer's method can simply raise an
error. Callers wrap a call in `translate_rpc_errors`, and catch the same class of error that the method raised. Used on
the asyncio event loop.
"""

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, NoReturn, TypeVar, cast

import grpc
from grpc import StatusCode

from baton.channel_options import require_version, version_of
from baton.errors import BatonError
from baton.rpc_status import encode_error
from baton.rpc_status import from_rpc_error as from_rpc_error
from baton.rpc_status import translate_rpc_errors as translate_rpc_errors

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

Check = Callable[[str, Iterable[tuple[str, str | bytes]]], None]
"""Function that checks a call before the server accepts it. Its arguments are the call's full method name and metadata.
It raises an error to refuse the call."""

logger = logging.getLogger(__name__)


_ABORT_S = 5.0
"""Maximum time in seconds that a handler waits until its status is sent. A caller that does not read its messages
delays the status."""
FAILED_WRITE = "Internal error from Core"
"""Details text of the status that grpc.aio sets when a write fails."""


class SentStatus:
    """Status that the server sent for a call with a stream of requests. Create this object before the first write of
    the call.

    When a write fails because the call is ending, grpc.aio sets two statuses, in either order: INTERNAL for the failed
    write, and the server's status. It then raises the status that was set last (grpc issue 36066). This object keeps
    the status that was set first, so that `of` can return the server's status in both cases.
    """

    def __init__(self, call: grpc.aio.Call) -> None:
        self._first: grpc.aio.AioRpcError | None = None
        call.add_done_callback(lambda _: self._keep(call))

    def of(self, raised: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """Return the status that the server sent, for a call that raised the error `raised`. The code of the returned
        status may be OK."""
        return raised if self._first is None or self._first.details() == FAILED_WRITE else self._first

    def _keep(self, call: grpc.aio.Call) -> None:
        code, text = _present(call.code()), _present(call.details())
        self._first = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), _present(call.trailing_metadata()), text)


def _present(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never has to wait."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return cast(T, stop.value)
    raise AssertionError("a call that is done has its status")


VERSIONED = (
    "/baton.v1.GenerationGroup/",
    "/baton.v1.PrefillRank/",
    "/baton.v1.BlockExchange/",
    "/baton.v1.Admin/",
    "/baton.v1.Orchestrator/GetClusterState",
    "/baton.v1.Orchestrator/GetRequests",
)
"""Prefixes of the gRPC methods whose messages may change between versions. Callers of these methods must run a
compatible version."""


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Server interceptor that refuses invalid calls and converts exceptions to gRPC statuses.

    A call is refused before its messages are read if the caller fails the check or has an incompatible version. A
    BatonError raised by a servicer's asynchronous method gets its status from the table of `baton.rpc_status`. Any
    other exception becomes INTERNAL, and its traceback is logged by the server.
    """

    def __init__(self, check: Check | None = None) -> None:
        self._check = check

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """Return the handler of one call. The handler either runs the servicer's method and converts its exceptions to
        statuses, or refuses the call."""
        handler = await continuation(details)
        if handler is None:
            return None  # the method does not exist: grpc answers UNIMPLEMENTED
        try:
            self._require_welcome(details)
        except Exception as error:  # noqa: BLE001 - the caller gets it as a status, the log its traceback
            return _refusal(error, details.method)
        streams = (handler.request_streaming, handler.response_streaming)
        kind = "_".join("stream" if each else "unary" for each in streams)
        make_handler = getattr(grpc, f"{kind}_rpc_method_handler")
        method = _guard(getattr(handler, kind), details.method)
        return make_handler(method, handler.request_deserializer, handler.response_serializer)

    def _require_welcome(self, details: grpc.HandlerCallDetails) -> None:
        metadata = details.invocation_metadata or ()
        if self._check is not None:
            self._check(details.method, metadata)
        if details.method.startswith(VERSIONED):
            require_version(version_of(str(dict(metadata).get("user-agent", ""))), f"the caller of {details.method}")


def _refusal(error: Exception, name: str) -> Any:
    """Return a handler that ends any call with this error. It is declared to receive a stream of requests, so that grpc
    does not read a request before the handler runs."""

    async def refuse(requests: AsyncIterator[bytes], context: Context) -> None:
        await _abort(context, error, name)

    return grpc.stream_stream_rpc_method_handler(refuse)


Method = Callable[[Any, Any], Any]


def _guard(method: Method, name: str) -> Method:
    if inspect.isasyncgenfunction(method):
        return _guard_stream(method, name)
    if inspect.iscoroutinefunction(method):
        return _guard_reply(method, name)
    return method  # the generated stub of a method that the servicer lacks: it answers UNIMPLEMENTED


def _guard_reply(method: Method, name: str) -> Method:
    async def guarded(request: Any, context: Context) -> Any:
        try:
            return await method(request, context)
        except Exception as error:  # noqa: BLE001 - the caller gets it as a status, the log its traceback
            await _abort(context, error, name)

    return guarded


def _guard_stream(method: Method, name: str) -> Method:
    async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            async with aclosing(method(request, context)) as replies:
                async for reply in replies:
                    yield reply
        except Exception as error:  # noqa: BLE001 - the caller gets it as a status, the log its traceback
            await _abort(context, error, name)

    return guarded


async def _abort(context: Context, error: Exception, name: str) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, BatonError):
        logger.error("%s failed", name, exc_info=error)
    error.__traceback__ = None  # grpc keeps it in a cycle, and with it all that the method held
    status = StatusCode.INTERNAL, f"internal error in {name}: the server's log has the traceback"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ABORT_S):
            await context.abort(*(encode_error(error) if isinstance(error, BatonError) else status))
    raise asyncio.CancelledError  # gRPC sends the status once the caller reads on; the handler does not wait
