"""A network in which calls of a test's choice stand still: before they are heard, or before their answer is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from baton_lab.chaos.network import Context, FaultyNetwork, Replies
from tests.support.clusters.fault_plans import PickedPlan


class HeldCalls:
    """Which calls stand still, until all are let go."""

    def __init__(self) -> None:
        self.num_standing = 0
        self._held: set[tuple[str, bool]] = set()
        self._reached = asyncio.Event()
        self._released = asyncio.Event()

    def hold(self, method: str, *, answer: bool = False) -> None:
        """Calls of that method are not heard, or with `answer`, their answers are not."""
        self._held.add((method, answer))

    def release(self) -> None:
        """No call stands still any more."""
        self._released.set()

    async def until_reached(self) -> None:
        """Some call stands still."""
        await asyncio.wait_for(self._reached.wait(), 20)

    async def pass_by(self, method: str, *, answer: bool) -> None:
        """Returns when the call may go on."""
        if (method, answer) in self._held:
            self._reached.set()
            self.num_standing += 1
            try:
                await self._released.wait()
            finally:
                self.num_standing -= 1


class HoldingNetwork(FaultyNetwork):
    """Passes all calls on, when they may."""

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
