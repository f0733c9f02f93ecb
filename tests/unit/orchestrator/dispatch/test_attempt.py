"""Slots and ranks through an attempt: waited for, kept while the chain stands still, given back when nobody wants them;
jobs are in the book of their group for as long as ranks have them.
"""

import asyncio
import itertools
import math
import random
from collections.abc import AsyncIterator, Callable
from functools import partial

import grpc
import pytest

from baton.errors import ResourceExhaustedError, UnavailableError
from baton.planning.cost_model import CostModel
from baton.process.clock import SystemClock
from baton.proto_types import timings_from_proto
from baton.sampling_params import SamplingParams
from baton.transport.channel import make_server
from baton.types import Epoch, JobId, Rank, RequestId, TokenEvent
from baton.v1 import common_pb2, kv_pb2, kv_pb2_grpc
from orchestrator.dispatch.attempt import AttemptRunner
from orchestrator.membership.members import Membership
from orchestrator.membership.prefill_queues import Pending
from orchestrator.membership.view import ClusterView, GenerationGroup, PrefillGroup
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.record import RequestRecord
from orchestrator.requests.request import Request
from orchestrator.requests.tenants import Tenant
from orchestrator.workers.client import Clients
from tests.support.clusters.clients import CLOCK, Answer
from tests.support.clusters.cluster import HASTY, BareCluster, cluster
from tests.support.clusters.planners import linear_planner, planner_of
from tests.support.clusters.turns import generate
from tests.support.engines.generation import prompt, reference_ids
from tests.support.eventually import eventually
from tests.support.manual_clock import ManualClock, StoppedClock
from tests.support.wire.rpc import listening
from tests.support.wire.secret import SECRET

pytestmark = pytest.mark.integration

Context = grpc.aio.ServicerContext[object, object]
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
COSTLY = CostModel(num_layers=2, linear_s=1e-4, pair_s=0.0, kv_bytes=0, fixed_s=2e-3)
"""Under load, several ranks are for long prompts only."""
SLOW = CostModel(num_layers=2, linear_s=0.1, pair_s=0.0, kv_bytes=0)
"""What ranks have before them is there as long as a test may take."""


class HeldReceiver(kv_pb2_grpc.KvReceiverServicer):
    """Grants slots when the test lets it, and remembers what was given back."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.granted = asyncio.Event()
        self.told = asyncio.Event()
        self.freed = asyncio.Event()
        self.aborted: list[int] = []

    async def Reserve(self, request: kv_pb2.ReserveRequest, context: Context) -> common_pb2.Lease:
        self.asked.set()
        await self.granted.wait()
        return common_pb2.Lease(ref=common_pb2.LeaseRef(slot=1, stamp=77), num_tokens=request.num_tokens)

    async def Renew(self, request: kv_pb2.RenewRequest, context: Context) -> kv_pb2.RenewReply:
        raise AssertionError("nothing runs that would need the slot")

    async def Push(self, request_iterator: AsyncIterator[kv_pb2.KvPiece], context: Context) -> kv_pb2.PushReply:
        raise AssertionError("nothing was computed")

    async def PushShared(
        self, request_iterator: AsyncIterator[kv_pb2.SharedPieces], context: Context
    ) -> AsyncIterator[kv_pb2.SharedAnswer]:
        raise AssertionError("nothing was computed")
        yield

    async def Commit(self, request: kv_pb2.CommitRequest, context: Context) -> kv_pb2.CommitReply:
        raise AssertionError("nothing was pushed")

    async def Abort(self, request: kv_pb2.AbortRequest, context: Context) -> kv_pb2.AbortReply:
        self.told.set()
        await self.freed.wait()
        self.aborted.append(request.lease.stamp)
        return kv_pb2.AbortReply()


def ignore(event: TokenEvent) -> None:
    raise AssertionError(f"no token was due: {event}")


@pytest.fixture
async def receiver() -> AsyncIterator[tuple[HeldReceiver, str]]:
    server, held = make_server(), HeldReceiver()
    kv_pb2_grpc.add_KvReceiverServicer_to_server(held, server)
    async with listening(server) as port:
        yield held, f"127.0.0.1:{port}"


async def test_a_slot_that_is_granted_after_its_request_left_is_given_back(receiver: tuple[HeldReceiver, str]) -> None:
    held, endpoint = receiver
    members, clients = Membership(), Clients(SECRET)
    group = GenerationGroup("g", endpoint, "layout", num_slots=1, max_slot_tokens=100)
    members.update(ClusterView((PrefillGroup("p", ("127.0.0.1:1",), Epoch(1)),), (group,)))
    attempt_runner = AttemptRunner(members, clients, linear_planner(), SystemClock(), OrchestratorConfig())
    record = RequestRecord.of(Request(RequestId("r"), (1, 2, 3), PARAMS), received_ns=0)
    record.admit(StoppedClock(1))
    attempt = asyncio.create_task(attempt_runner.attempt(record, ignore))
    await held.asked.wait()
    assert len(members.prefill_queues) == 0  # what has no slot runs nowhere
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    assert members.load("g").num_requests == 0
    held.granted.set()
    closing = asyncio.create_task(attempt_runner.close())
    await held.told.wait()
    assert not closing.done()
    held.freed.set()
    await closing
    assert held.aborted == [77]
    await clients.prune(())


async def test_a_lease_is_kept_alive_while_the_chain_stands_still() -> None:
    ttl_s = 12.0  # renewed after a third of it
    async with cluster(num_ranks=1, config=OrchestratorConfig(lease_ttl_s=ttl_s)) as made:
        slots = made.groups[0].slots

        async def ends_s() -> float:
            return slots.next_deadline_s()

        made.rank_gates[0].shut()
        running = asyncio.create_task(made.ask(made.request(prompt(20), PARAMS)))
        await made.rank_gates[0].until_reached()
        end_s = await ends_s()
        for _ in range(2):
            end_s = await eventually(ends_s, lambda later_s, former_s=end_s: later_s > former_s)  # type: ignore[misc]
        assert end_s < math.inf
        assert slots.ledger().num_leased == 1
        made.rank_gates[0].open()
        answer = await running
        assert answer.end.usage.num_attempts == 1


async def test_a_slot_that_a_stranger_holds_is_waited_for() -> None:
    async with cluster(num_slots=1) as made:
        slots = made.groups[0].slots
        lease = made.lease_to_stranger()
        running = asyncio.create_task(made.ask(made.request(prompt(20), PARAMS)))
        await eventually(made.state, lambda state: state.groups[1].num_requests == 1)
        slots.abort(lease)
        answer = await running
        assert answer.end.usage.num_attempts == 1


async def loaded(made: BareCluster, name: str) -> int:
    return made.members.load(name).num_requests


async def test_a_group_that_has_no_room_after_all_is_left_for_one_that_has() -> None:
    """And both are asked again while neither has: whichever has room first takes the request."""
    async with cluster(num_groups=2, num_slots=1) as made:
        leases = [made.lease_to_stranger(group) for group in range(2)]
        made.groups[1].slots.abort(leases[1])
        answer = await made.ask(made.request(prompt(20), PARAMS))
        assert answer.end.usage.num_attempts == 1
        leases[1] = made.lease_to_stranger(1)
        running = asyncio.create_task(made.ask(made.request(prompt(20), PARAMS)))
        for name in ("group-1", "group-0", "group-1"):
            await eventually(partial(loaded, made, name), bool)
        made.groups[0].slots.abort(leases[0])
        answer = await running
        assert answer.end.usage.num_attempts == 1
        made.groups[1].slots.abort(leases[1])


async def test_requests_that_no_group_has_room_for_are_given_up_in_time() -> None:
    async with cluster(num_groups=2, num_slots=1, config=HASTY) as made:
        leases = [made.lease_to_stranger(group) for group in range(2)]
        with pytest.raises((ResourceExhaustedError, UnavailableError)):
            await made.ask(made.request(prompt(20), PARAMS))
        for group, lease in zip(made.groups, leases, strict=True):
            group.slots.abort(lease)


# Ranks, and the book of what they have before them.


def occupy(made: BareCluster, left_s: dict[Rank, float]) -> Callable[[], None]:
    """Books a job that is served before all others; returns what takes it out again."""
    (group,), now_s = made.view().prefill, CLOCK.now_s()
    made.members.prefill_queues.add(group.incarnation, JobId(1), Pending(0.0, math.inf, left_s), now_s)
    return lambda: made.members.prefill_queues.release(group.incarnation, JobId(1), list(left_s), now_s)


async def test_the_ranks_that_were_chosen_are_those_that_ran() -> None:
    async with cluster(num_ranks=3) as made:
        for busy, expected in (((), (0, 1, 2)), ((0,), (1, 2)), ((1,), (0, 2)), ((0, 2), (1,))):
            free = occupy(made, {Rank(rank): 1e6 for rank in busy}) if busy else None
            answer = await made.ask(made.request(prompt(40), PARAMS))
            if free is not None:
                free()
            assert answer.token_ids == reference_ids(made.decoder, prompt(40), PARAMS)
            timings = timings_from_proto(answer.end.timings)
            assert tuple(rank.rank for rank in timings.prefill.ranks) == expected
            assert sum(len(rank.tokens) for rank in timings.prefill.ranks) == 40
            assert timings.prefill.width is not None
            assert (timings.prefill.width.width, timings.prefill.width.num_ranks) == (len(expected), 3)
            assert [option.width for option in timings.prefill.width.options] == [1, 2, 3]


async def test_a_job_is_booked_on_each_rank_until_that_has_done_its_part() -> None:
    async with cluster() as made:
        (group,) = made.view().prefill
        made.rank_gates[1].shut()
        running = asyncio.create_task(made.ask(made.request(prompt(40), PARAMS)))
        await made.rank_gates[1].until_reached()

        async def ranks() -> list[set[Rank]]:
            return [set(job.left_s) for job in made.members.prefill_queues.pending(group.incarnation, CLOCK.now_s())]

        await eventually(ranks, lambda booked: booked == [{Rank(1)}])
        made.rank_gates[1].open()
        await running
        assert len(made.members.prefill_queues) == 0


async def test_a_light_tenant_s_prompt_passes_a_heavy_one_s_jobs_on_their_rank() -> None:
    async with cluster(num_ranks=1, planner=planner_of(SLOW)) as made:

        async def num_booked() -> int:
            return len(made.members.prefill_queues)

        made.rank_gates[0].shut()
        asked = []
        for number, tenant in enumerate(("heavy", "heavy", "heavy", "light")):
            request = Request(RequestId(f"{number}"), prompt(40, number), PARAMS, tenant=Tenant(tenant))
            asked.append(asyncio.create_task(generate(made, request)))
            await eventually(num_booked, lambda booked, most=number + 1: booked == most)  # type: ignore[misc]

        async def num_jobs() -> int:
            return made.ranks[0].engine.status().num_jobs

        await eventually(num_jobs, lambda known: known == len(asked))
        made.rank_gates[0].open()
        *_, heavy, light = await asyncio.gather(*asked)
        assert light.timings.prefill.width is not None
        assert (light.timings.prefill.width.num_ahead, light.timings.prefill.width.num_jobs) == (1, 3)
        assert light.timings.prefill.ranks[0].end_ns < heavy.timings.prefill.ranks[0].start_ns


async def test_an_inelastic_orchestrator_gives_everybody_all_ranks() -> None:
    async with cluster(config=OrchestratorConfig(elastic=False), planner=planner_of(COSTLY)) as made:
        answers = await asyncio.gather(*(made.ask(made.request(prompt(5 + n), PARAMS)) for n in range(6)))
        for answer in answers:
            assert [rank.rank for rank in answer.end.timings.prefill.ranks] == [0, 1]


@pytest.mark.parametrize("seed", range(3))
async def test_mixed_widths_and_clients_that_leave(seed: int) -> None:
    rng = random.Random(seed)
    asked = [prompt(rng.choice([3, 10, 30, 300]), n) for n in range(24)]
    widths = set()
    async with cluster(num_ranks=3, num_slots=12, planner=planner_of(COSTLY)) as made:
        leaving = [made.open(made.request(ids, PARAMS)) for ids in asked[:8]]
        running = [asyncio.create_task(made.ask(made.request(ids, PARAMS))) for ids in asked]
        for call in leaving:
            await Answer().read(call, rng.randrange(3))
            call.cancel()
        for ids, answer in zip(asked, await asyncio.gather(*running), strict=True):
            assert answer.token_ids == reference_ids(made.decoder, ids, PARAMS)
            widths.add(len(answer.end.timings.prefill.ranks))
    assert len(widths) > 1


async def test_a_job_whose_rank_is_gone_is_in_no_book() -> None:
    async with cluster(config=HASTY) as made:
        made.rank_gates[1].shut()
        running = asyncio.create_task(made.ask(made.request(prompt(40), PARAMS)))
        await made.rank_gates[1].until_reached()
        assert len(made.members.prefill_queues) == 1
        made.members.update(made.view(prefill_ready=False))
        made.rank_gates[1].open()
        await made.ranks[0].stop()
        answer = await running
        assert answer.token_ids == reference_ids(made.decoder, prompt(40), PARAMS)
        assert len(made.members.prefill_queues) == 0


def test_job_numbers_ascend_over_lives_of_the_orchestrator() -> None:
    clock = ManualClock(start_s=100)
    first = AttemptRunner(Membership(), Clients(SECRET), linear_planner(), clock, OrchestratorConfig())
    issued = list(itertools.islice(first._numbers, 3))
    clock.advance(1)
    issued.append(
        next(AttemptRunner(Membership(), Clients(SECRET), linear_planner(), clock, OrchestratorConfig())._numbers)
    )
    assert issued == sorted(set(issued))
    assert 0 < issued[0] < 2**63
