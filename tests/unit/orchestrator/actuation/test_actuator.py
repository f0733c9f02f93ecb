"""A group has one change at a time: a change that was called off ends before the next one begins."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from baton.calls.cluster_state import GroupState
from baton.process.clock import SystemClock
from baton.types import Epoch
from orchestrator.actuation.actuator import Actuator
from orchestrator.actuation.operations import GroupOperations
from orchestrator.autoscaling.actions import Action, LeadTimes, Move
from orchestrator.membership.members import Membership
from orchestrator.membership.view import ClusterView, GenerationGroup, Orders, PrefillGroup
from tests.support.eventually import eventually


class HeldPoller:
    """A poller of workers that answers when it may. A drain sees a change of its order only after an answer."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()

    async def ask(self) -> None:
        await self.may_answer.wait()

    def group(self, name: str) -> GroupState | None:
        return GroupState(name, name.partition("-")[0], ("host:1",), 1, is_ready=True, num_leaked=0, num_requests=1)


class Counted(GroupOperations):
    """Operations that count those that run, by group."""

    def __init__(self, members: Membership, poller: Any) -> None:
        super().__init__(members, poller)
        self.running: list[str] = []
        self.most_at_once = 0

    async def left(self) -> list[str]:
        return list(self.running)

    async def _count(self, name: str, states: AsyncGenerator[GroupState, None]) -> AsyncGenerator[GroupState, None]:
        self.running.append(name)
        self.most_at_once = max(self.most_at_once, self.running.count(name))
        try:
            async for state in states:
                yield state
        finally:
            await states.aclose()
            self.running.remove(name)

    def flip(self, name: str) -> AsyncGenerator[GroupState, None]:
        return self._count(name, super().flip(name))

    def drain(self, name: str, *, leave: bool, returns: bool = False) -> AsyncGenerator[GroupState, None]:
        return self._count(name, super().drain(name, leave=leave, returns=returns))


@pytest.mark.parametrize(
    ("change", "call_off"),
    [
        pytest.param(Move.FLIP_TO_GENERATE, Move.FLIP_TO_PREFILL, id="flip"),
        pytest.param(Move.DRAIN_PREFILL, Move.START_PREFILL, id="drain"),
    ],
)
async def test_a_change_begins_when_the_one_that_was_called_off_has_ended(change: Move, call_off: Move) -> None:
    members, poller, faults = Membership(), HeldPoller(), list[dict[str, Any]]()
    prefill = (PrefillGroup("prefill-0", ("host:1",), Epoch(1)),)
    generation = tuple(GenerationGroup(f"generate-{n}", f"host:{n + 2}", "", 4, 100) for n in range(2))
    members.update(ClusterView(prefill, generation))
    members.hear_kept(Orders())
    operations = Counted(members, poller)
    actuator = Actuator(members, operations, SystemClock(), LeadTimes(1.0, 1.0))
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    try:
        with members.hold("prefill-0"):  # it is never idle
            for move in (change, call_off, change):
                actuator.carry_out([Action(move, 1, 1.0)])
                await asyncio.sleep(0)  # its task begins, and waits for the poller
            assert "prefill-0" not in members.orders.drained, "the group is chosen although its change has not ended"
            poller.may_answer.set()
            await eventually(operations.left, lambda names: "prefill-0" not in names)
            actuator.carry_out([Action(change, 1, 1.0)])
            assert "prefill-0" in members.orders.drained
            await asyncio.sleep(0)
    finally:
        await actuator.close()
    assert operations.most_at_once == 1
    assert faults == []
