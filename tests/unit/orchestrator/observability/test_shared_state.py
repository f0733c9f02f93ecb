"""Callers who ask for the cluster's state at once share one question to its workers."""

import asyncio

import pytest

from orchestrator.composition import build_orchestrator
from orchestrator.membership.members import Membership
from orchestrator.membership.view import ClusterView, GenerationGroup
from orchestrator.workers.worker_poller import WorkerPoller
from tests.support.clusters.planners import linear_planner
from tests.support.manual_clock import ManualClock
from tests.support.wire.secret import SECRET


async def test_workers_are_asked_once_until_the_answers_are_stale_or_workers_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At most twice for 100 callers, the first of which leaves while the workers are asked for it."""
    asked: list[float] = []
    clock, members, is_asked, may_answer = ManualClock(7.0), Membership(), asyncio.Event(), asyncio.Event()
    overview = build_orchestrator(members, linear_planner(), clock, secret=SECRET).overview

    async def ask(poller: WorkerPoller) -> None:
        asked.append(clock.now_s())
        is_asked.set()
        await may_answer.wait()
        clock.advance(1.0)  # as when a worker is silent

    monkeypatch.setattr(WorkerPoller, "ask", ask)
    callers = [asyncio.create_task(overview.state()) for _ in range(100)]
    await is_asked.wait()
    callers[0].cancel()
    may_answer.set()
    await asyncio.gather(*callers, return_exceptions=True)
    assert asked == [7.0] * 2

    clock.advance(0.2)
    await overview.state()
    assert len(asked) == 2
    clock.advance(0.05)
    await overview.state()
    assert len(asked) == 3
    members.update(ClusterView(generation=(GenerationGroup("g", "127.0.0.1:1", "layout", 1, 16, True),)))
    await overview.state()
    assert len(asked) == 4
