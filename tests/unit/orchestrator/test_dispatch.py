"""Slots through an attempt: waited for, kept alive while the chain stands still, given back when nobody wants them."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from baton.clock import SystemClock
from baton.ids import Epoch, RequestId
from baton.sampling_params import SamplingParams
from baton.types import TokenEvent
from baton.v1 import common_pb2, kv_pb2, kv_pb2_grpc
from orchestrator.clients import Clients
from orchestrator.config import OrchestratorConfig
from orchestrator.dispatch import Dispatcher
from orchestrator.lifecycle import RequestRecord
from orchestrator.membership import ClusterView, GenerationGroup, Members, PrefillGroup
from planning.partition import EvenPartitioner
from tests.support.eventually import eventually
from tests.support.generation import prompt
from tests.support.orchestrators import relay
from transport.channel import bind, make_server
from transport.kv_sink import ReserveSpec

Context = grpc.aio.ServicerContext[object, object]
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


class HeldReceiver(kv_pb2_grpc.KvReceiverServicer):
    """Grants slots when the test lets it, and remembers what was given back."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.granted = asyncio.Event()
        self.aborted: list[int] = []

    async def Reserve(self, request: kv_pb2.ReserveRequest, context: Context) -> common_pb2.Lease:
        self.asked.set()
        await self.granted.wait()
        return common_pb2.Lease(ref=common_pb2.LeaseRef(slot=1, stamp=77), num_tokens=request.num_tokens)

    async def Renew(self, request: kv_pb2.RenewRequest, context: Context) -> kv_pb2.RenewReply:
        raise AssertionError("nothing runs that would need the slot")

    async def Push(self, request_iterator: AsyncIterator[kv_pb2.KvPiece], context: Context) -> kv_pb2.PushReply:
        raise AssertionError("nothing was computed")

    async def Commit(self, request: kv_pb2.CommitRequest, context: Context) -> kv_pb2.CommitReply:
        raise AssertionError("nothing was pushed")

    async def Abort(self, request: kv_pb2.AbortRequest, context: Context) -> kv_pb2.AbortReply:
        self.aborted.append(request.lease.stamp)
        return kv_pb2.AbortReply()


def ignore(event: TokenEvent) -> None:
    raise AssertionError(f"no token was due: {event}")


@pytest.fixture
async def receiver() -> AsyncIterator[tuple[HeldReceiver, str]]:
    server, held = make_server(), HeldReceiver()
    kv_pb2_grpc.add_KvReceiverServicer_to_server(held, server)
    endpoint = f"127.0.0.1:{bind(server, '127.0.0.1')}"
    await server.start()
    yield held, endpoint
    await server.stop(0)


async def test_a_slot_that_is_granted_after_its_request_left_is_given_back(receiver: tuple[HeldReceiver, str]) -> None:
    held, endpoint = receiver
    members, clients = Members(), Clients()
    group = GenerationGroup("g", endpoint, "layout", num_slots=1, max_slot_tokens=100)
    members.update(ClusterView((PrefillGroup("p", ("127.0.0.1:1",), Epoch(1)),), (group,)))
    dispatcher = Dispatcher(members, clients, EvenPartitioner(), SystemClock(), OrchestratorConfig())
    record = RequestRecord.of(RequestId("r"), (1, 2, 3), PARAMS, received_ns=0)
    record.admit(1)
    attempt = asyncio.create_task(dispatcher.attempt(record, ignore))
    await held.asked.wait()
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    assert members.load("g").num_requests == 0
    held.granted.set()
    await dispatcher.close()
    assert held.aborted == [77]
    await clients.prune(())


async def test_a_lease_is_kept_alive_while_the_chain_stands_still() -> None:
    async with relay(config=OrchestratorConfig(lease_ttl_s=0.2)) as made:
        made.rank_gates[0].shut()
        running = asyncio.create_task(made.ask(made.request(prompt(20), PARAMS)))
        await made.rank_gates[0].until_reached()
        await asyncio.sleep(0.6)  # not for anybody: time itself is what would end the lease
        assert made.groups[0].slots.ledger().num_leased == 1
        made.rank_gates[0].open()
        answer = await running
        assert answer.finished is not None
        assert answer.finished.usage.num_attempts == 1


async def test_a_slot_that_a_stranger_holds_is_waited_for() -> None:
    async with relay(num_slots=1) as made:
        slots = made.groups[0].slots
        lease = slots.reserve(ReserveSpec(RequestId("stranger"), 1, 10, 20, 60))
        running = asyncio.create_task(made.ask(made.request(prompt(20), PARAMS)))
        await eventually(made.state, lambda state: state.groups[1].num_requests == 1, within_s=5)
        slots.abort(lease.ref)
        answer = await running
        assert answer.finished is not None
        assert answer.finished.usage.num_attempts == 1
