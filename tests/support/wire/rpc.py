"""Plain gRPC methods on a real server, for tests of interceptors and transport. Messages are bytes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from baton.transport.channel import Keepalive, bind, make_channel, make_server
from baton.transport.status_interceptor import Check

Context = grpc.aio.ServicerContext[Any, Any]
Handlers = dict[str, "grpc.RpcMethodHandler[Any, Any]"]
UNARY, STREAM, UPLOAD = "/test.Service/Unary", "/test.Service/Stream", "/test.Service/Upload"


class Service:
    """Service whose methods return their request. Tests override them."""

    async def unary(self, request: bytes, context: Context) -> bytes:
        return request

    async def stream(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        yield request

    async def upload(self, requests: AsyncIterator[bytes], context: Context) -> bytes:
        return b"".join([request async for request in requests])


@asynccontextmanager
async def served(
    service: Service,
    *,
    port: int = 0,
    keepalive: Keepalive | None = None,
    check: Check | None = None,
    name: str = "test.Service",
) -> AsyncIterator[int]:
    """Serve `service` on 127.0.0.1 under the name `name`, and yield the port."""
    handlers: Handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(service.unary),
        "Stream": grpc.unary_stream_rpc_method_handler(service.stream),
        "Upload": grpc.stream_unary_rpc_method_handler(service.upload),
        "GetAllNodeInfo": grpc.unary_unary_rpc_method_handler(service.unary),
    }
    async with serving_methods(name, handlers, make_server(keepalive, check=check), port) as bound:
        yield bound


@asynccontextmanager
async def serving_methods(
    name: str, handlers: Handlers, server: grpc.aio.Server | None = None, port: int = 0
) -> AsyncIterator[int]:
    """Serve the methods of the service `name` on 127.0.0.1, and yield the port."""
    server = server or make_server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    async with listening(server, port) as bound:
        yield bound


@asynccontextmanager
async def listening(server: grpc.aio.Server, port: int = 0) -> AsyncIterator[int]:
    """Run the server on 127.0.0.1, and yield its port. All calls end when the context ends."""
    bound = bind(server, "127.0.0.1", port)
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(grace=0)


@asynccontextmanager
async def connected(service: Service) -> AsyncIterator[grpc.aio.Channel]:
    """Serve `service`, and yield a channel to it."""
    async with served(service) as port, make_channel(f"127.0.0.1:{port}") as channel:
        yield channel


async def call_unary(channel: grpc.aio.Channel, request: bytes = b"", timeout_s: float = 60.0) -> bytes:
    """Call the method `unary`. Errors are raised as gRPC raises them."""
    return await channel.unary_unary(UNARY, bytes, bytes)(request, timeout=timeout_s)
