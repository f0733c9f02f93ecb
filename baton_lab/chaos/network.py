"""Proxy that injects network faults in front of one server (a faulty network), and a spawner that puts one in front of
each worker.

The proxy is a gRPC server that forwards every call, unchanged or with a fault that a plan selects. It forwards messages
as bytes with the caller's metadata. It does not add the cluster's secret; the server gets the secret only if the caller
has sent it. The proxy parses only the answer of a Reserve call, which is a lease. It replaces the lease's endpoint by
its own, so that KV pushes also pass through the proxy.

A frozen proxy forwards nothing in either direction, as if the worker's process were stopped. Connections through the
proxy stay open, so no keepalive timeout ends a dropped call. Instead, the proxy fails it after `DEAD_S` seconds. Runs
on the event loop.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc

from baton.errors import UnavailableError
from baton.process.crash_notes import Crash
from baton.transport.channel import bind, make_channel, make_server
from baton.transport.status_interceptor import FAILED_WRITE, SentStatus
from baton.v1 import common_pb2
from baton_lab.chaos.faults import Fault, FaultPlan, Strike
from deploy.config.worker import WorkerConfig
from deploy.groups.spawner import Spawner, WorkerHandle

HOST = "127.0.0.1"
DEAD_S = 0.7
SLOW_S = 0.2
"""Maximum delay of a slow call in seconds."""
_MOST_REPLIES = 8
"""Maximum number of replies that are forwarded before a stream is cut."""

_ALWAYS = frozenset((Fault.SLOW, Fault.REFUSE, Fault.LOSE, Fault.DROP))
_REPEATABLE = frozenset(("Reserve", "Renew", "Commit", "Abort", "Cancel", "Push"))
"""Methods whose calls the proxy may deliver twice. Calls of other methods are delivered once, because their clients
never send the same call twice: a retry is a new call with a new number. A Push call is repeated as a whole."""
_STREAMS = frozenset(("Streams", "Generate", "PushShared"))
"""Streaming methods that the proxy may cut between two replies."""
_OF_CONNECTION = ("grpc-", "user-agent")
"""Prefixes of metadata keys that belong to one connection. The proxy does not forward these keys."""

Context = grpc.aio.ServicerContext[bytes, bytes]
Call = grpc.aio.StreamStreamCall[bytes, bytes]
Replies = AsyncGenerator[bytes, None]


class FaultyNetwork(grpc.GenericRpcHandler):
    """gRPC proxy on a port of its own that injects network faults. It forwards calls to the server that is given to
    `open`. Create it and call `open` on the event loop."""

    def __init__(self, plan: FaultPlan) -> None:
        self.endpoint = ""
        """Address (`host:port`) of the proxy. The rest of the cluster uses it as the server's address. Empty before
        `open`."""
        self.plan = plan
        """Plan that selects the faults."""
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._closing = False
        self._inside: set[asyncio.Task[Any]] = set()
        """Tasks of the forwarded calls that have not ended."""
        self._server = make_server()
        self._channel: grpc.aio.Channel | None = None

    async def open(self, target: str) -> None:
        """Start forwarding calls to the server at `target` (`host:port`)."""
        self._channel = make_channel(target)
        self.endpoint = f"{HOST}:{bind(self._server, HOST)}"
        self._server.add_generic_rpc_handlers((self,))
        await self._server.start()

    async def close(self) -> None:
        """Abort all forwarded calls, like a process that dies. Idempotent."""
        self._closing = True
        self._thawed.set()
        await self._server.stop(0)
        if self._inside:
            await asyncio.wait(self._inside)  # grpc loses calls that begin while their channel closes
        if self._channel is not None:
            await self._channel.close()

    def freeze(self) -> None:
        """Stop forwarding data in both directions until `close` is called."""
        self._thawed.clear()

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        """Return a handler that forwards the call to the server. All methods are accepted."""
        method = details.method

        async def forward(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
            task = asyncio.current_task()
            assert task is not None
            self._inside.add(task)
            try:
                async with contextlib.aclosing(self._forward(method, requests, context)) as replies:
                    async for reply in replies:
                        yield reply
            finally:
                self._inside.discard(task)

        return grpc.stream_stream_rpc_method_handler(forward)

    async def _forward(self, path: str, requests: AsyncIterator[bytes], context: Context) -> Replies:
        method = path.rpartition("/")[2]
        strike = self.plan.next(method, _ALWAYS | {Fault.TWICE} if method in _REPEATABLE else _ALWAYS)
        await self._thawed.wait()
        await _before(strike)
        if strike is not None and strike.fault is Fault.TWICE:
            requests = _again(kept := [request async for request in requests])
            async for _ in self._pass_on(path, _again(kept), context):
                pass
        num_replies = 0
        async with contextlib.aclosing(self._pass_on(path, requests, context)) as replies:
            async for reply in replies:
                await self._thawed.wait()
                if method in _STREAMS:
                    await _within(strike, num_replies)
                num_replies += 1
                if method not in _STREAMS and strike is not None and strike.fault is Fault.LOSE:
                    raise UnavailableError(f"{method}: the answer was lost on its way")
                yield self._own_lease(reply) if method == "Reserve" else reply

    async def _pass_on(self, path: str, requests: AsyncIterator[bytes], context: Context) -> Replies:
        """Forward the call and its status unchanged."""
        if self._closing:
            raise UnavailableError("the connection was refused")
        assert self._channel is not None
        metadata = tuple(pair for pair in context.invocation_metadata() or () if not pair[0].startswith(_OF_CONNECTION))
        call: Call = self._channel.stream_stream(path)(timeout=context.time_remaining(), metadata=metadata)
        sent = SentStatus(call)
        pumping = asyncio.create_task(_pump(requests, call))
        try:
            while isinstance(reply := await call.read(), bytes):
                yield reply
        except grpc.aio.AioRpcError as error:
            status = sent.of(error)
            if status.code() is grpc.StatusCode.OK or status.details() == FAILED_WRITE:
                raise UnavailableError("the connection broke while a request was written") from error
            await context.abort(status.code(), status.details() or "", tuple(status.trailing_metadata()))
        finally:
            if not call.cancel():  # after a failed write, grpc.aio considers the call ended while its core does not
                call._cython_call.cancel("")  # type: ignore[attr-defined]
            pumping.cancel()
            await asyncio.gather(pumping, return_exceptions=True)

    def _own_lease(self, reply: bytes) -> bytes:
        lease = common_pb2.Lease.FromString(reply)
        lease.endpoint = self.endpoint
        return lease.SerializeToString()


class NetworkedWorker:
    """Worker behind a proxy that injects network faults. Implements WorkerHandle."""

    def __init__(self, inner: WorkerHandle, network: FaultyNetwork) -> None:
        self.inner = inner
        self.endpoint = network.endpoint
        self.replaced = asyncio.Event()
        """Event that is set when the replacement of this worker serves."""
        self._network = network
        self._cutting = asyncio.create_task(self._cut())

    @property
    def config(self) -> WorkerConfig:
        """Configuration with which the worker was started."""
        return self.inner.config

    @property
    def pid(self) -> int:
        """Process id of the worker; 0 if the worker is a server in this process."""
        return self.inner.pid

    @property
    def ended(self) -> bool:
        """Return True if the worker's process has ended."""
        return self.inner.ended

    def stop(self) -> None:
        """Stop the worker with SIGSTOP. If the worker is a server in this process, freeze its network instead. Its
        calls then get no answer and do not end."""
        if self.pid:
            os.kill(self.pid, signal.SIGSTOP)
        else:
            self._network.freeze()

    async def serve_as(self, config: WorkerConfig) -> None:
        """Give the worker a configuration to serve with, and put a new faulty network in front of it."""
        await self._network.close()
        await self.inner.serve_as(config)
        self._network = FaultyNetwork(self._network.plan)
        await self._network.open(self.inner.endpoint)
        self.endpoint = self._network.endpoint

    async def wait(self) -> str:
        """Wait until the worker has ended and its forwarded calls have ended. Return a description of how the worker
        ended."""
        how = await self.inner.wait()
        await asyncio.shield(self._cutting)
        return how

    async def crash(self) -> Crash | None:
        """Return how the worker crashed; None if it did not crash."""
        return await self.inner.crash()

    def kill(self) -> None:
        """Kill the worker's process."""
        self.inner.kill()

    async def close(self) -> None:
        """End the worker, and wait until the calls that the proxy forwards to it have ended."""
        await self.inner.close()
        await asyncio.shield(self._cutting)

    async def _cut(self) -> None:
        await self.inner.wait()
        await self._network.close()


class NetworkedSpawner:
    """Spawner that puts a proxy with network faults in front of every worker that it starts. Implements Spawner."""

    def __init__(self, inner: Spawner, plan: FaultPlan) -> None:
        self.workers: dict[str, NetworkedWorker] = {}
        """Workers by name. A replacement takes the entry of the worker that it replaces."""
        self._inner = inner
        self._plan = plan

    async def start(self, config: WorkerConfig) -> NetworkedWorker:
        """Start a worker and the faulty network in front of it."""
        inner = await self._inner.start(config)
        network = FaultyNetwork(self._plan)
        await network.open(inner.endpoint)
        made, former = NetworkedWorker(inner, network), self.workers.get(config.name)
        self.workers[config.name] = made
        if former is not None:
            former.replaced.set()
        return made


async def _before(strike: Strike | None) -> None:
    """Apply a fault to a call before it reaches the server."""
    match strike:
        case Strike(Fault.SLOW, amount):
            await asyncio.sleep(amount * SLOW_S)
        case Strike(Fault.REFUSE):
            raise UnavailableError("the connection was refused")
        case Strike(Fault.DROP):
            await asyncio.sleep(DEAD_S)
            raise UnavailableError("the connection was found dead")


async def _within(strike: Strike | None, num_replies: int) -> None:
    """Apply a fault to the reply with index `num_replies` of a stream."""
    match strike:
        case Strike(Fault.SLOW, amount):
            await asyncio.sleep(amount * SLOW_S / _MOST_REPLIES)
        case Strike(Fault.LOSE, amount) if num_replies >= int(amount * _MOST_REPLIES):
            raise UnavailableError("the connection broke")


async def _again(requests: list[bytes]) -> AsyncIterator[bytes]:
    for request in requests:
        yield request


async def _pump(requests: AsyncIterator[bytes], call: Call) -> None:
    # The call may end before all requests are written. Its status gives the reason.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        async for request in requests:
            await call.write(request)
        await call.done_writing()
