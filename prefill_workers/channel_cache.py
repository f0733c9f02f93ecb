"""The channels to generation groups that a prefill rank keeps open: one an endpoint, the idle ones bounded.

Groups come and go with new ports while a rank lives on; a channel to one that is gone would hold its memory, and try to
connect, for good. Knows no gRPC: a channel is what can be closed. On the loop.
"""

from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar


class Closable(Protocol):
    """What a cache needs of a channel."""

    async def close(self) -> None: ...


Channel = TypeVar("Channel", bound=Closable)


class ChannelCache(Generic[Channel]):
    """`most`: channels that stay open, unless more are in use; whose use lies furthest back is closed first."""

    def __init__(self, make: Callable[[str], Channel], most: int = 64) -> None:
        self._make = make
        self._most = most
        self._channels: OrderedDict[str, Channel] = OrderedDict()
        """By endpoint, in the order of their last uses."""
        self._num_users: Counter[str] = Counter()

    @asynccontextmanager
    async def use(self, endpoint: str) -> AsyncIterator[Channel]:
        """The endpoint's channel, which stays open meanwhile."""
        if endpoint not in self._channels:
            self._channels[endpoint] = self._make(endpoint)
        self._num_users[endpoint] += 1
        try:
            yield self._channels[endpoint]
        finally:
            self._num_users[endpoint] -= 1
            self._channels.move_to_end(endpoint)
            self._num_users += Counter()  # forgets those that nobody uses
            await self._close_excess()

    async def close(self) -> None:
        """Closes all; once none is in use."""
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close()

    async def _close_excess(self) -> None:
        idle = [endpoint for endpoint in self._channels if endpoint not in self._num_users]
        num_excess = max(len(self._channels) - self._most, 0)
        for channel in [self._channels.pop(endpoint) for endpoint in idle[:num_excess]]:
            await channel.close()
