"""Keeps a worker's channels to other workers open: one per endpoint, with a limit on the number of idle channels.

Other workers may restart with new ports while this worker runs. Without a limit, channels to workers that no longer
exist would use memory and try to connect forever. Used by `prefill_workers.servicer` and
`baton.transport.block_exchange`. Runs on the event loop.
"""

from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc


class ChannelCache:
    """Open channels by endpoint. At most `most` channels are kept open, unless more are in use at the same time. When
    there are more, the idle channel that was used least recently is closed first."""

    def __init__(self, make: Callable[[str], grpc.aio.Channel], most: int = 64) -> None:
        self._make = make
        self._most = most
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        """Open channels by endpoint, sorted from the least to the most recently used."""
        self._num_users: Counter[str] = Counter()

    @asynccontextmanager
    async def use(self, endpoint: str) -> AsyncIterator[grpc.aio.Channel]:
        """Return a context manager that provides the channel to an endpoint. The channel stays open until the context
        exits."""
        if endpoint not in self._channels:
            self._channels[endpoint] = self._make(endpoint)
        self._num_users[endpoint] += 1
        try:
            yield self._channels[endpoint]
        finally:
            self._num_users[endpoint] -= 1
            self._channels.move_to_end(endpoint)
            self._num_users += Counter()  # removes endpoints without users
            await self._close_excess()

    async def close(self) -> None:
        """Close all channels. Call once, when no channel is in use."""
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close()

    async def _close_excess(self) -> None:
        idle = [endpoint for endpoint in self._channels if endpoint not in self._num_users]
        num_excess = max(len(self._channels) - self._most, 0)
        for channel in [self._channels.pop(endpoint) for endpoint in idle[:num_excess]]:
            await channel.close()
