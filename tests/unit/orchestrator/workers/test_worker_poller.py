"""A leak is what was unknown all the time, for over two seconds; where the workers are real: tests/system."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import cast

import pytest

from baton.calls.cluster_state import GenerationStatus, StepSample
from baton.errors import UnavailableError
from baton.planning.step_cost import LearntCosts
from baton.planning.work_cost import WorkCost
from baton.process.clock import SystemClock
from orchestrator.membership.members import Membership
from orchestrator.membership.view import ClusterView, GenerationGroup
from orchestrator.workers.client import Clients, WorkerClient
from orchestrator.workers.worker_poller import LEAK_S, Leaks, WorkerPoller
from tests.support.manual_clock import ManualClock
from tests.support.wire.secret import SECRET

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("seen", "num_leaked"),
    [
        pytest.param({0.0: 2, 0.5: 2, 0.75: 2}, 0, id="unknown for a short time"),
        pytest.param({0.0: 2, 0.5: 2, 1.0: 2}, 2, id="unknown for long"),
        pytest.param({0.0: 1, 0.25: 1, 0.5: 0, 0.75: 1, 1.0: 1}, 0, id="known meanwhile"),
        pytest.param({0.0: 0, 0.5: 3, 1.0: 1, 1.5: 2, 2.0: 5}, 1, id="the least of the last seconds counts"),
        pytest.param({0.0: 0, 5.0: 4, 6.0: 4}, 4, id="old observations do not count"),
        pytest.param({0.0: -3, 1.0: -3}, 0, id="requests that hold nothing yet"),
    ],
)
def test_what_was_unknown_all_the_time_is_leaked(seen: dict[float, int], num_leaked: int) -> None:
    """`seen`: the slots of no known request, by time in units of LEAK_S."""
    leaks = Leaks(lease_ttl_s=0.0)
    for at, unknown in seen.items():
        leaks.observe(at * LEAK_S, unknown)
    assert leaks.num_leaked == num_leaked


def watched(leaks: Leaks, unknown: int, leased: int, over_s: float) -> int:
    """What is leaked when that much was unknown, and leased, for so long."""
    for step in range(round(2 * over_s) + 1):
        leaks.observe(step / 2, unknown, leased)
    return leaks.num_leaked


def test_leased_slots_are_leaked_after_their_ttl_and_others_before() -> None:
    assert watched(Leaks(30.0), 1, 1, over_s=31.5) == 0
    assert watched(Leaks(30.0), 1, 1, over_s=32.0) == 1
    assert watched(Leaks(30.0), 3, 1, over_s=LEAK_S) == 2


def members_with(endpoint: str = "127.0.0.1:1") -> Membership:
    """Members of one generation group."""
    members = Membership()
    members.update(ClusterView(generation=(GenerationGroup("group", endpoint, "layout", 1, 100),)))
    return members


class LeakyClients(Clients):
    """Connections to a worker with one slot of no known request, which answers while `answers` is True."""

    answers = True

    @contextlib.contextmanager
    def use(self, endpoint: str) -> Iterator[WorkerClient]:
        yield cast(WorkerClient, self)

    async def generation_status(self, timeout_s: float) -> GenerationStatus:
        if not self.answers:
            raise UnavailableError("it is away")
        return GenerationStatus(num_slots=1)


async def test_leaks_are_counted_anew_after_a_gap_in_answers() -> None:
    clients, clock = LeakyClients(SECRET), ManualClock()
    poller = WorkerPoller(members_with(), clients, clock)
    counts = []
    for answers in (True, True, False, True, True):
        clients.answers = answers
        await poller.ask()
        counts.append(poller.groups()[0].num_leaked)
        clock.advance(LEAK_S)
    assert counts == [0, 1, 0, 0, 1]


async def test_a_worker_that_has_left_while_it_was_asked_ends_no_other_question() -> None:
    connected, gone = asyncio.Event(), asyncio.Event()

    async def answer_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await gone.wait()
        writer.close()

    async with await asyncio.start_server(answer_nothing, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        members, clients = members_with(f"127.0.0.1:{port}"), Clients(SECRET)
        poller = WorkerPoller(members, clients, SystemClock())
        asking = asyncio.create_task(poller.ask())
        await connected.wait()
        members.update(ClusterView())
        await poller.ask()
        gone.set()
        await asking
        await clients.prune(())
    assert poller.groups() == ()


class CountingClients(Clients):
    """Connections to a worker with one slot, held or free."""

    is_held, num_asked = False, 0

    @contextlib.contextmanager
    def use(self, endpoint: str) -> Iterator[WorkerClient]:
        yield cast(WorkerClient, self)

    async def generation_status(self, timeout_s: float) -> GenerationStatus:
        self.num_asked += 1
        return GenerationStatus(num_slots=1, num_free=0 if self.is_held else 1)


async def test_workers_that_hold_nothing_are_asked_seldom() -> None:
    members, clients, clock = members_with(), CountingClients(SECRET), ManualClock()
    poller = WorkerPoller(members, clients, clock)

    async def looks(num_looks: int) -> int:
        """Look that often, 0.5 s apart; return how many questions were asked."""
        before = clients.num_asked
        for _ in range(num_looks):
            await poller.look()
            clock.advance(0.5)
        return clients.num_asked - before

    assert await looks(8) == 2
    with members.hold("group"):
        assert await looks(4) == 4
    clients.is_held = True  # one that no request of this orchestrator holds
    assert await looks(8) == 5  # those from the first that finds it on
    clients.is_held = False
    assert await looks(4) == 1
    members.update(members_with("127.0.0.1:2").view)
    assert await looks(1) == 1


class FailingClients(Clients):
    """Connections whose first use fails as nobody foresaw."""

    def __init__(self) -> None:
        super().__init__(SECRET)
        self.num_uses = 0
        self.used_again = asyncio.Event()

    @contextlib.contextmanager
    def use(self, endpoint: str) -> Iterator[WorkerClient]:
        self.num_uses += 1
        if self.num_uses == 1:
            raise OSError(24, "Too many open files")
        self.used_again.set()
        with super().use(endpoint) as client:
            yield client


async def test_a_failure_that_nobody_foresaw_ends_no_polling(caplog: pytest.LogCaptureFixture) -> None:
    clients = FailingClients()
    counting = asyncio.create_task(WorkerPoller(members_with(), clients, SystemClock()).run(0.01))
    await asyncio.wait_for(clients.used_again.wait(), 60)
    counting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await counting
    await clients.prune(())
    assert "Too many open files" in caplog.text


class ReportingClients(LeakyClients):
    """Connections to a worker that reports costs of its steps."""

    async def generation_status(self, timeout_s: float) -> GenerationStatus:
        status = await super().generation_status(timeout_s)
        status.kv.num_bytes = status.kv.num_bytes_free = 10
        status.step_costs.plain.step_s, status.step_costs.verifying.pair_s = 0.5, 0.25
        status.step_costs.prefill_s, status.step_costs.num_steps = 0.125, 7
        return status


async def test_costs_that_a_group_reports_are_kept_while_it_answers_and_exists() -> None:
    members, clients = members_with(), ReportingClients(SECRET)
    poller = WorkerPoller(members, clients, ManualClock())
    costs = LearntCosts(WorkCost(0.5, 0.0, 0.0, 0.0), WorkCost(0.0, 0.0, 0.0, 0.25), 0.125, 7)
    await poller.ask()
    assert (members.step_costs, members.num_bytes_free) == ({"group": costs}, {"group": 10})
    clients.answers = False
    await poller.ask()
    assert not members.step_costs and not members.num_bytes_free
    clients.answers = True
    await poller.ask()
    assert members.step_costs == {"group": costs}
    members.update(ClusterView())
    await poller.ask()
    assert not members.step_costs and not members.num_bytes_free


class SteppingClients(LeakyClients):
    """Connections to a worker that makes a step between two polls if `steps` is True, and learns from it. Its n-th step
    takes n seconds; a step costs n s after the n-th."""

    steps, num_steps = True, 0

    async def generation_status(self, timeout_s: float) -> GenerationStatus:
        status = await super().generation_status(timeout_s)
        self.num_steps += self.steps
        status.num_steps, status.last_step.duration_s = self.num_steps, self.num_steps
        status.step_costs.plain.step_s, status.step_costs.num_steps = self.num_steps, self.num_steps
        return status


async def test_a_new_step_is_told_with_the_costs_that_were_known_before_it() -> None:
    told = list[tuple[float, float | None]]()

    def on_step(step: StepSample, costs: LearntCosts | None) -> None:
        told.append((step.duration_s, None if costs is None else costs.plain.step_s))

    members, clients = members_with(), SteppingClients(SECRET)
    poller = WorkerPoller(members, clients, ManualClock(), on_step)
    for steps in (True, True, False, True):  # the first poll tells nothing: the step may be old
        clients.steps = steps
        await poller.ask()
    assert told == [(2.0, 1.0), (3.0, 2.0)]
    members.step_costs.clear()
    await poller.ask()
    assert told[-1] == (4.0, None)
    clients.answers = False
    await poller.ask()
    clients.answers = True
    await poller.ask()
    assert len(told) == 3  # nothing is known of the worker before its gap
