"""A network that holds calls chosen by the test, either before the receiver gets the request or before the caller gets
the answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from baton_lab.chaos.network import Context, FaultyNetwork, Replies
from tests.support.clusters.fault_plans import PickedPlan


class HeldCalls:
    """Set of the methods whose calls are held, until all are released."""

    def __init__(self) -> None:
        self.num_standing = 0
        self._held: set[tuple[str, bool]] = set()
        self._reached = asyncio.Event()
        self._released = asyncio.Event()

    def hold(self, method: str, *, answer: bool = False) -> None:
        """Hold all calls of `method` before the request is delivered, or with `answer`, before the answer is
        delivered."""
        self._held.add((method, answer))

    def release(self) -> None:
        """Release all held calls. Hold no further ones."""
        self._released.set()

    async def until_reached(self) -> None:
        """Wait until a call is held."""
        await asyncio.wait_for(self._reached.wait(), 20)

    async def pass_by(self, method: str, *, answer: bool) -> None:
        """Wait while the call is held."""
        if (method, answer) in self._held:
            self._reached.set()
            self.num_standing += 1
            try:
                await self._released.wait()
            finally:
                self.num_standing -= 1


class HoldingNetwork(FaultyNetwork):
    """Network that forwards all calls, unless they are held."""

    def __init__(self, calls: HeldCalls) -> None:
        super().__init__(PickedPlan({}, 0.0))
        self._calls = calls

    async def _pass_on(self, path: str, requests: AsyncIterator[bytes], context: Context) -> Replies:
        method = path.rpartition("/")[2]
        await self._calls.pass_by(method, answer=False)
        async with aclosing(super()._pass_on(path, requests, context)) as replies:
            async for reply in replies:
                await self._calls.pass_by(method, answer=True)
                yield reply
