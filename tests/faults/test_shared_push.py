"""Pushes through shared memory between real processes: either process is killed, or cannot access the other's
memory."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from baton.errors import UnavailableError
from baton.transport.channel import make_channel
from baton.transport.kv_client import KvClient
from baton.transport.kv_routes import make_pool
from baton.transport.kv_sender import PushSummary, open_push
from baton.transport.kv_sink import ReserveSpec
from baton.transport.shared_memory import CellPool
from baton.types import Lease, RequestId, TokenRange
from tests.support.eventually import eventually
from tests.support.wire.kv_loopback import FIRST, WIDE, Loopback, loopback, offer_all, result_of, rows
from tests.support.wire.push_process import NUM_TOKENS, WHOLE, running
from tests.support.wire.shared_push import files_in_memory, shared_files

pytestmark = pytest.mark.integration

NOBODY = "65534"
OWN_PROCESS_NUMBERS = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.fixture(autouse=True)
async def _nothing_stays() -> AsyncIterator[None]:
    """No shared memory is left in this process, and no file in the node's memory, whoever was killed."""
    before, folder = shared_files(), files_in_memory()
    yield
    await eventually(files, lambda now: now == before)
    assert files_in_memory() == folder


@pytest.fixture
def pool() -> Iterator[CellPool]:
    made = make_pool(WIDE)
    yield made
    made.close()


async def files() -> list[str]:
    return shared_files()


async def reserved(channel: grpc.aio.Channel) -> Lease:
    spec = ReserveSpec(RequestId("r"), 1, NUM_TOKENS, NUM_TOKENS, 60.0)
    return await KvClient(channel).reserve(spec, WIDE.fingerprint)


async def endpoint_of(receiver: asyncio.subprocess.Process) -> str:
    assert receiver.stdout is not None
    return (await asyncio.wait_for(receiver.stdout.readline(), 60)).decode().strip()


async def arrived(loop: Loopback, lease: Lease) -> None:
    """The first row is in the slot, and its writer is inside."""
    first = TokenRange(0, 1)

    async def read() -> bytes:
        return loop.sink.read(lease.ref, 0, first)

    await loop.sink.writers_become(lease.ref.slot, 1)
    await eventually(read, lambda row: row == rows(first, 0, WIDE))


async def test_killed_sender_leaves_the_slot_to_another() -> None:
    async with loopback(layout=WIDE, capacity_tokens=NUM_TOKENS) as loop:
        lease = await loop.reserve(NUM_TOKENS)
        async with running("send", loop.endpoint, str(lease.ref.slot), str(lease.ref.stamp)):
            await arrived(loop, lease)
            assert shared_files()
        await loop.sink.writers_become(lease.ref.slot, 0)
        session = loop.open_push(lease)
        offer_all(session, WIDE, NUM_TOKENS)
        session.finish()
        assert isinstance(await result_of(session), PushSummary)
        await loop.client.commit(lease.ref, [FIRST])
        for layer in range(WIDE.num_layers):
            assert loop.sink.read(lease.ref, layer, WHOLE) == rows(WHOLE, layer, WIDE)


async def test_killed_receiver_ends_the_push(pool: CellPool) -> None:
    data = memoryview(rows(WHOLE, 0, WIDE))
    async with running("receive") as receiver, make_channel(await endpoint_of(receiver)) as channel:
        session = open_push(channel, WIDE, await reserved(channel), pool=pool)
        for _ in range(1000):
            session.offer(0, WHOLE, data)

        async def mapped_there() -> list[str]:
            return shared_files(receiver.pid)

        await eventually(mapped_there, bool)
        receiver.kill()
        assert type(await result_of(session)) is UnavailableError


async def push_to(endpoint: str, pool: CellPool) -> PushSummary:
    """A whole push, committed."""
    async with make_channel(endpoint) as channel:
        lease = await reserved(channel)
        session = open_push(channel, WIDE, lease, pool=pool)
        offer_all(session, WIDE, NUM_TOKENS)
        session.finish()
        summary = await asyncio.wait_for(session.result(), 60)
        assert await KvClient(channel).commit(lease.ref, [FIRST]) == NUM_TOKENS * WIDE.token_bytes
        return summary


async def test_a_process_of_the_same_node_and_user_shares_memory(pool: CellPool) -> None:
    async with running("receive") as receiver:
        summary = await push_to(await endpoint_of(receiver), pool)
    assert summary.num_bytes_shared == summary.num_bytes == NUM_TOKENS * WIDE.token_bytes


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users, or count processes anew")


@needs_root
async def test_another_user_gets_a_stream(pool: CellPool) -> None:
    async with running("receive", NOBODY) as receiver:
        assert (await push_to(await endpoint_of(receiver), pool)).num_bytes_shared == 0


@needs_root
async def test_a_container_that_counts_processes_anew_gets_a_stream(pool: CellPool) -> None:
    async with running("receive", under=OWN_PROCESS_NUMBERS) as receiver:
        assert (await push_to(await endpoint_of(receiver), pool)).num_bytes_shared == 0
