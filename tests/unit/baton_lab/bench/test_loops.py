"""Loads: an open loop waits for no answer, a closed one for each, and every request ends in exactly one record."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from baton.errors import BatonError, ConfigError
from baton.process.clock import SystemClock
from baton_lab.bench import grpc_server
from baton_lab.bench.conversations import Conversation, Shape, Turn, conversations
from baton_lab.bench.grpc_server import GrpcServer
from baton_lab.bench.lengths import Mix, Spread
from baton_lab.bench.loops import Arrivals, Generator, Users
from baton_lab.bench.passages import Passages
from baton_lab.bench.records import Record
from baton_lab.bench.server import Style
from baton_lab.traffic.traces.arrivals import gamma_arrivals
from tests.support.clusters.deadlines import Deadlines
from tests.support.clusters.scripted_orchestrator import Fault, ScriptedOrchestrator, serving, text_of
from tests.support.eventually import eventually
from tests.support.manual_clock import ManualClock

pytestmark = pytest.mark.integration


def one_turn(max_tokens: int = 3) -> Iterator[Conversation]:
    return (Conversation(number, "", (Turn(f"prompt {number}", max_tokens),)) for number in range(10_000))


async def until_asked(service: ScriptedOrchestrator, num_requests: int) -> None:
    """The service has so many requests, soon."""

    async def num_asked() -> int:
        return len(service.requests)

    await eventually(num_asked, lambda num: num >= num_requests)


async def test_arrivals_are_not_delayed_by_answers_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """No coordinated omission: while every answer hangs, all requests are sent when they are due."""
    deadlines = Deadlines(monkeypatch, grpc_server)
    at_s = gamma_arrivals(200.0, 0.25, 40, np.random.default_rng(1)).tolist()
    service = ScriptedOrchestrator([Fault(after=0, hang=True)] * len(at_s))
    async with serving(service) as target, GrpcServer.connected(target, None, Style()) as server:
        running = asyncio.create_task(Generator(server, SystemClock()).run(Arrivals("a", 200.0, at_s), one_turn()))
        await until_asked(service, len(at_s))
        deadlines.let_pass()
        run = await running
    assert [each.failure for each in run.records] == ["timeout"] * len(at_s)
    assert sorted(each.due_s for each in run.records) == at_s
    assert min(each.lateness_s for each in run.records) >= 0
    assert run.seconds >= at_s[-1]


async def test_latencies_count_from_the_instant_at_which_a_request_was_due() -> None:
    """A generator that cannot keep up counts its own delay: here it is held while an arrival is due."""
    held = 0.05

    class HeldClock(SystemClock):
        """Stands in the way of the second arrival, as a busy machine does."""

        num_asked = 0

        def now_s(self) -> float:
            self.num_asked += 1
            if self.num_asked == 3:  # before the wait for the second arrival
                until = super().now_s() + held
                while super().now_s() < until:
                    pass
            return super().now_s()

    async with serving(ScriptedOrchestrator()) as target, GrpcServer.connected(target, None, Style()) as server:
        run = await Generator(server, HeldClock()).run(Arrivals("a", 1.0, [0.0, 0.001]), one_turn())
    second = max(run.records, key=lambda each: each.due_s)
    assert second.lateness_s >= held - 0.002
    assert second.ttft_s >= second.message_s[0] - second.sent_s + held - 0.002


async def test_a_closed_loop_has_as_many_requests_as_users(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines = Deadlines(monkeypatch, grpc_server)
    service = ScriptedOrchestrator([Fault(after=0, hang=True)] * 3)
    ended: list[Record] = []
    async with serving(service) as target, GrpcServer.connected(target, None, Style()) as server:
        generator = Generator(server, ManualClock(), ended.append)
        running = asyncio.create_task(generator.run(Users("3 users", 3, num_conversations=10), one_turn()))
        await until_asked(service, 3)
        deadlines.let_pass()
        run = await running
    assert len(service.requests) == 10 and ended == run.records
    assert sorted(each.conversation for each in run.records) == list(range(10))
    assert [each.failure for each in run.records].count("timeout") == 3
    assert all(each.due_s == each.sent_s for each in run.records)


async def test_a_closed_loop_ends_in_time() -> None:
    clock = ManualClock()
    async with serving(ScriptedOrchestrator()) as target, GrpcServer.connected(target, None, Style()) as server:
        generator = Generator(server, clock, lambda record: clock.advance(0.1))
        run = await generator.run(Users("2 users", 2, seconds=0.3), one_turn())
    assert len(run.records) > 2 and all(each.is_answered for each in run.records)
    assert max(each.sent_s for each in run.records) < 0.3 <= run.seconds


async def test_turns_are_asked_with_all_that_was_said_before() -> None:
    turns = Turn("One?", 2), Turn("Two?", 1, think_s=0.05), Turn("Three?", 1)
    service = ScriptedOrchestrator()
    async with serving(service) as target, GrpcServer.connected(target, None, Style(is_chat=True)) as server:
        run = await Generator(server, SystemClock()).run(
            Arrivals("a", 1.0, [0.0]), iter([Conversation(0, "Be brief.", turns)])
        )
    said = [[(each.role, each.content) for each in request.chat.messages] for request in service.requests]
    first = [("system", "Be brief."), ("user", "One?")]
    second = [*first, ("assistant", text_of(2)), ("user", "Two?")]
    assert said == [first, second, [*second, ("assistant", text_of(1)), ("user", "Three?")]]
    one, two, _ = run.records
    assert [each.turn for each in run.records] == [0, 1, 2]
    assert two.sent_s - one.end_s >= 0.05 - 0.002
    assert two.sent_s >= two.due_s - 0.002 >= one.end_s + 0.05 - 0.004


async def test_after_a_failure_a_conversation_ends_and_its_turns_are_counted() -> None:
    service = ScriptedOrchestrator([Fault(after=2**31), Fault(after=1, error=BatonError("a bug"))])
    made = Conversation(0, "", tuple(Turn(f"turn {number}", 2) for number in range(4)))
    async with serving(service) as target, GrpcServer.connected(target, None, Style()) as server:
        run = await Generator(server, SystemClock()).run(Arrivals("a", 1.0, [0.0]), iter([made]))
    assert [each.failure for each in run.records] == ["", "Baton"] and run.num_unasked == 2
    assert run.records[1].explanation == "a bug" and len(run.records[1].message_s) == 1


async def test_a_text_that_is_used_up_ends_the_load_with_its_error() -> None:
    passages = Passages([f"w{number}" for number in range(12)], 1)
    made = conversations(passages, Shape(Mix(Spread(3), Spread(1))), 1)
    async with serving(ScriptedOrchestrator()) as target, GrpcServer.connected(target, None, Style()) as server:
        with pytest.raises(ConfigError, match="no new passage left"):
            await Generator(server, SystemClock()).run(Users("2 users", 2, seconds=30.0), made)
