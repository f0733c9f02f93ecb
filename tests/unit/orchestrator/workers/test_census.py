"""A leak is what was unknown all the time, for over two seconds; where the workers are real: tests/system."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import cast

import pytest

from baton.clock import SystemClock
from baton.cluster_state import GenerationStatus
from baton.errors import UnavailableError
from orchestrator.membership.members import Members
from orchestrator.membership.view import ClusterView, GenerationGroup
from orchestrator.workers.census import LEAK_S, Census, Excess, Leaks
from orchestrator.workers.client import Clients, WorkerClient
from tests.support.manual_clock import ManualClock
from tests.support.wire.secret import SECRET

pytestmark = pytest.mark.integration


def test_what_is_unknown_for_long_is_leaked() -> None:
    excess = Excess()
    for step in range(5):
        excess.observe(step * LEAK_S / 4, 2)
        assert excess.num_leaked == (2 if step == 4 else 0)


def test_what_was_known_meanwhile_is_not_leaked() -> None:
    excess = Excess()
    for step, unknown in enumerate([1, 1, 0, 1, 1]):
        excess.observe(step * LEAK_S / 4, unknown)
    assert excess.num_leaked == 0


def test_the_least_of_the_last_seconds_counts() -> None:
    excess = Excess()
    for step, unknown in enumerate([0, 3, 1, 2, 5]):
        excess.observe(step * LEAK_S / 2, unknown)
    assert excess.num_leaked == 1


def test_old_observations_do_not_count() -> None:
    excess = Excess()
    excess.observe(0.0, 0)
    excess.observe(10.0, 4)
    excess.observe(10.0 + LEAK_S, 4)
    assert excess.num_leaked == 4


def test_requests_that_hold_nothing_yet_are_no_negative_leak() -> None:
    excess = Excess()
    excess.observe(0.0, -3)
    excess.observe(LEAK_S, -3)
    assert excess.num_leaked == 0


def watched(leaks: Leaks, unknown: int, leased: int, over_s: float) -> int:
    """What is leaked when that much was unknown, and leased, for so long."""
    for step in range(round(2 * over_s) + 1):
        leaks.observe(step / 2, unknown, leased)
    return leaks.num_leaked


def test_leased_slots_are_leaked_after_their_ttl_and_others_before() -> None:
    assert watched(Leaks(30.0), 1, 1, over_s=31.5) == 0
    assert watched(Leaks(30.0), 1, 1, over_s=32.0) == 1
    assert watched(Leaks(30.0), 3, 1, over_s=LEAK_S) == 2


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
    members, clients, clock = Members(), LeakyClients(SECRET), ManualClock()
    members.update(ClusterView(generation=(GenerationGroup("group", "127.0.0.1:1", "layout", 1, 100),)))
    census = Census(members, clients, clock)
    counts = []
    for answers in (True, True, False, True, True):
        clients.answers = answers
        await census.ask()
        counts.append(census.groups()[0].num_leaked)
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
        members, clients = Members(), Clients(SECRET)
        census = Census(members, clients, SystemClock())
        members.update(ClusterView(generation=(GenerationGroup("group", f"127.0.0.1:{port}", "layout", 4, 100),)))
        asking = asyncio.create_task(census.ask())
        await connected.wait()
        members.update(ClusterView())
        await census.ask()
        gone.set()
        await asking
        await clients.prune(())
    assert census.groups() == ()


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
    members, clients, clock = Members(), CountingClients(SECRET), ManualClock()
    census = Census(members, clients, clock)

    async def looks(num_looks: int) -> int:
        """Look that often, 0.5 s apart; return how many questions were asked."""
        before = clients.num_asked
        for _ in range(num_looks):
            await census.look()
            clock.advance(0.5)
        return clients.num_asked - before

    members.update(ClusterView(generation=(GenerationGroup("group", "127.0.0.1:1", "layout", 1, 100),)))
    assert await looks(8) == 2
    with members.hold("group"):
        assert await looks(4) == 4
    clients.is_held = True  # one that no request of this orchestrator holds
    assert await looks(8) == 5  # those from the first that finds it on
    clients.is_held = False
    assert await looks(4) == 1
    other = GenerationGroup("group", "127.0.0.1:2", "layout", 1, 100)
    members.update(ClusterView(generation=(other,)))
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


async def test_a_failure_that_nobody_foresaw_ends_no_census(caplog: pytest.LogCaptureFixture) -> None:
    members, clients = Members(), FailingClients()
    members.update(ClusterView(generation=(GenerationGroup("group", "127.0.0.1:1", "layout", 4, 100),)))
    counting = asyncio.create_task(Census(members, clients, SystemClock()).run(0.01))
    await asyncio.wait_for(clients.used_again.wait(), 10)
    counting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await counting
    await clients.prune(())
    assert "Too many open files" in caplog.text
