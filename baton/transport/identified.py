"""Channel that adds the same metadata to all of its calls, by which the servers of a cluster recognise the caller.

Only the channel is wrapped: users get grpc's own call objects. Client interceptors would wrap each call as well. Made
by `baton.transport.channel.make_channel`; used on its loop.
"""

from types import TracebackType
from typing import Any, Self

import grpc


class IdentifiedChannel(grpc.aio.Channel):
    """Channel that adds metadata to each call of the channel that it wraps. It owns the wrapped channel."""

    def __init__(self, inner: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...]) -> None:
        self._inner = inner
        self._metadata = metadata

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._inner.__aexit__(kind, error, traceback)

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        """Return a callable for a method with one request and one reply."""
        return self._identified(self._inner.unary_unary(method, *args, **options))

    def unary_stream(self, method: str, *args: Any, **options: Any) -> Any:
        """Return a callable for a method with one request and a stream of replies."""
        return self._identified(self._inner.unary_stream(method, *args, **options))

    def stream_unary(self, method: str, *args: Any, **options: Any) -> Any:
        """Return a callable for a method with a stream of requests and one reply."""
        return self._identified(self._inner.stream_unary(method, *args, **options))

    def stream_stream(self, method: str, *args: Any, **options: Any) -> Any:
        """Return a callable for a method with streams of requests and replies."""
        return self._identified(self._inner.stream_stream(method, *args, **options))

    def _identified(self, call: Any) -> Any:
        def identified(*args: Any, metadata: Any = (), **options: Any) -> Any:
            return call(*args, metadata=(*(metadata or ()), *self._metadata), **options)

        return identified
