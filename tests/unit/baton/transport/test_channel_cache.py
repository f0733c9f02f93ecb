"""Channels: one an endpoint, bounded, and never closed under whoever uses it."""

from contextlib import AsyncExitStack

import grpc

from baton.transport.channel import IdentifiedChannel
from baton.transport.channel_cache import ChannelCache


class Channel(IdentifiedChannel):
    def __init__(self, endpoint: str) -> None:
        super().__init__(grpc.aio.insecure_channel(endpoint), ())
        self.endpoint = endpoint
        self.is_open = True

    async def close(self, grace: float | None = None) -> None:
        self.is_open = False
        await super().close(grace)


class Made:
    """A cache, and all that it has ever made."""

    def __init__(self, most: int) -> None:
        self.channels: list[Channel] = []
        self.cache = ChannelCache(self._make, most)

    @property
    def open(self) -> set[str]:
        return {channel.endpoint for channel in self.channels if channel.is_open}

    async def use(self, *endpoints: str) -> None:
        for endpoint in endpoints:
            async with self.cache.use(endpoint) as channel:
                assert isinstance(channel, Channel)
                assert (channel.endpoint, channel.is_open) == (endpoint, True)

    def _make(self, endpoint: str) -> Channel:
        self.channels.append(Channel(endpoint))
        return self.channels[-1]


async def test_an_endpoint_keeps_its_channel() -> None:
    made = Made(2)
    async with made.cache.use("a") as first, made.cache.use("a") as second:
        assert first is second
    await made.use("a", "b", "a")
    assert [channel.endpoint for channel in made.channels] == ["a", "b"]


async def test_beyond_the_bound_the_one_used_longest_ago_is_closed() -> None:
    made = Made(2)
    await made.use("a", "b", "a", "c")
    assert made.open == {"a", "c"}
    await made.use("b")
    assert made.open == {"b", "c"}


async def test_one_in_use_is_never_closed_however_long_ago_its_use_began() -> None:
    made = Made(2)
    async with made.cache.use("a"):
        async with made.cache.use("a"):
            await made.use("b", "c", "d")
        await made.use("e", "f")
        assert made.open == {"a", "f"}
    await made.use("g")
    assert made.open == {"a", "g"}


async def test_more_in_use_than_the_bound_are_open_until_their_uses_end() -> None:
    made = Made(2)
    async with AsyncExitStack() as stack:
        for endpoint in "abcd":
            await stack.enter_async_context(made.cache.use(endpoint))
        assert made.open == set("abcd")
    assert len(made.open) == 2


async def test_close_leaves_none_open() -> None:
    made = Made(2)
    await made.use("a", "b")
    await made.cache.close()
    assert not made.open
