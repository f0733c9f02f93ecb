"""The network before one worker: a gRPC server that passes every call on, whole or, by a plan, not quite.

Calls pass as bytes, so it knows no message but the lease, whose endpoint it replaces by its own: pushes, too, go
through it. While it is frozen nothing passes in either direction, as if the worker's process were stopped. Connections
stay up; so a dropped call ends after `DEAD_S`, in place of the keepalive that would have found the peer dead. On the
loop.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc

from baton.errors import UnavailableError
from baton.v1 import common_pb2
from tests.support.fault_plans import Fault, FaultPlan, Strike
from transport.channel import bind, make_channel, make_server

HOST = "127.0.0.1"
DEAD_S = 0.7
SLOW_S = 0.2
"""A slow call's delay, at most."""
_MOST_REPLIES = 8
"""A stream is cut after fewer replies than this."""

_ALWAYS = frozenset((Fault.SLOW, Fault.REFUSE, Fault.LOSE, Fault.DROP))
_REPEATABLE = frozenset(("Reserve", "Renew", "Commit", "Abort", "Cancel"))
"""Whoever repeats another call gives it another number, and nothing else on the way repeats it. Pieces of a push are
repeated by whoever pushes: tests.support.faulty_ports."""

Context = grpc.aio.ServicerContext[bytes, bytes]
Call = grpc.aio.StreamStreamCall[bytes, bytes]


class FaultyNetwork(grpc.GenericRpcHandler):
    """Serves on `port` what the worker at `target` serves. Make it with `open`, on the loop."""

    def __init__(self, plan: FaultPlan) -> None:
        self.endpoint = ""
        """host:port that the rest of the cluster is told."""
        self._plan = plan
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._server = make_server()
        self._channel: grpc.aio.Channel | None = None

    async def open(self, target: str) -> None:
        """Serves, before the worker at host:port."""
        self._channel = make_channel(target)
        self.endpoint = f"{HOST}:{bind(self._server, HOST)}"
        self._server.add_generic_rpc_handlers((self,))
        await self._server.start()

    async def close(self) -> None:
        """Ends all calls at once, as a dying process does."""
        self._thawed.set()
        await self._server.stop(0)
        if self._channel is not None:
            await self._channel.close()

    def freeze(self) -> None:
        """Nothing passes any more, until `close`."""
        self._thawed.clear()

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        method = details.method

        async def forward(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
            async for reply in self._forward(method, requests, context):
                yield reply

        return grpc.stream_stream_rpc_method_handler(forward)

    async def _forward(self, path: str, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        method = path.rpartition("/")[2]
        strike = self._plan.next(method, _ALWAYS | {Fault.TWICE} if method in _REPEATABLE else _ALWAYS)
        await self._thawed.wait()
        await _before(strike)
        if strike is not None and strike.fault is Fault.TWICE:
            requests = _again(kept := [request async for request in requests])
            async for _ in self._pass_on(path, _again(kept), context):
                pass
        num_replies = 0
        async for reply in self._pass_on(path, requests, context):
            await self._thawed.wait()
            if method == "Stream":
                await _within(strike, num_replies)
            num_replies += 1
            if method != "Stream" and strike is not None and strike.fault is Fault.LOSE:
                raise UnavailableError(f"{method}: the answer was lost on its way")
            yield self._own_lease(reply) if method == "Reserve" else reply

    async def _pass_on(self, path: str, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        """The call as it should be, its status included."""
        assert self._channel is not None
        call: Call = self._channel.stream_stream(path)(timeout=context.time_remaining())
        pumping = asyncio.create_task(_pump(requests, call))
        try:
            while isinstance(reply := await call.read(), bytes):
                yield reply
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata()))
        finally:
            call.cancel()
            pumping.cancel()
            await asyncio.gather(pumping, return_exceptions=True)

    def _own_lease(self, reply: bytes) -> bytes:
        lease = common_pb2.Lease.FromString(reply)
        lease.endpoint = self.endpoint
        return lease.SerializeToString()


async def _before(strike: Strike | None) -> None:
    """What happens to a call before it is heard."""
    match strike:
        case Strike(Fault.SLOW, amount):
            await asyncio.sleep(amount * SLOW_S)
        case Strike(Fault.REFUSE):
            raise UnavailableError("the connection was refused")
        case Strike(Fault.DROP):
            await asyncio.sleep(DEAD_S)
            raise UnavailableError("the connection was found dead")


async def _within(strike: Strike | None, num_replies: int) -> None:
    """What happens to a stream's reply after so many."""
    match strike:
        case Strike(Fault.SLOW, amount):
            await asyncio.sleep(amount * SLOW_S / _MOST_REPLIES)
        case Strike(Fault.LOSE, amount) if num_replies >= int(amount * _MOST_REPLIES):
            raise UnavailableError("the connection broke")


async def _again(requests: list[bytes]) -> AsyncIterator[bytes]:
    for request in requests:
        yield request


async def _pump(requests: AsyncIterator[bytes], call: Call) -> None:
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the call has ended: its status says why
        async for request in requests:
            await call.write(request)
        await call.done_writing()
