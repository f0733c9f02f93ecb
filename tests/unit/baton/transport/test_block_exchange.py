"""Blocks between two nodes' stores, over real gRPC: whole or not at all, once, and bounded in time, whatever fails."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from baton.errors import InvalidArgumentError, RequestCancelledError
from baton.process.clock import SystemClock
from baton.transport import block_exchange
from baton.transport.block_exchange import BlockExchange
from baton.transport.status_interceptor import translate_rpc_errors
from baton.types import KvLayout
from baton.v1 import exchange_pb2
from baton.v1.exchange_pb2_grpc import BlockExchangeStub
from tests.support.clusters.deadlines import Deadlines
from tests.support.engines.prefixes import blocks_in, file_bytes
from tests.support.eventually import eventually
from tests.support.wire.block_nodes import BLOCK, LAYOUT, GatedBlocks, Node, node

pytestmark = pytest.mark.integration

NAMES = ("a", "b", "c", "d")
BLOCK_BYTES = BLOCK * LAYOUT.token_bytes
FILE_BYTES = file_bytes(LAYOUT, BLOCK)


def has(made: Node) -> set[str]:
    """Blocks in the node's folder, half-written files included."""
    return blocks_in(made.store._folder)


async def test_what_a_node_lacks_is_fetched() -> None:
    async with node() as source, node() as target:
        kv = source.keep(NAMES)
        target.keep(NAMES[:1])
        reply = await target.fetch(source, NAMES)
        assert (reply.num_stored, reply.num_bytes, reply.shortfall) == (4, 3 * BLOCK_BYTES, "")
        assert reply.copying_s > 0
        target.check(NAMES, kv)
        assert (source.exchange.num_bytes_sent, target.exchange.num_bytes_fetched) == (3 * BLOCK_BYTES, 3 * BLOCK_BYTES)


async def test_blocks_of_several_pieces_a_layer_come_whole() -> None:
    wide = KvLayout("weights", num_layers=2, num_kv_heads=3, head_dim=64, dtype="float32")
    async with node(layout=wide) as source, node(layout=wide) as target:
        kv = source.keep(("a", "b"), block_tokens=1000)
        reply = await target.fetch(source, ("a", "b"), block_tokens=1000)
        assert reply.num_bytes == 2000 * wide.token_bytes
        target.check(("a", "b"), kv, block_tokens=1000)


async def test_what_is_there_is_not_fetched_again() -> None:
    async with node() as source, node() as target:
        source.keep(NAMES)
        await target.fetch(source, NAMES)
        again = await target.fetch(source, NAMES)
        assert (again.num_stored, again.num_bytes) == (4, 0)
        assert source.exchange.num_bytes_sent == 4 * BLOCK_BYTES


async def test_equal_blocks_fetched_at_once_come_once() -> None:
    async with node() as source, node() as target:
        kv = source.keep(NAMES)
        source.keep(("a", "b", "x"))
        source.gate.shut(1)
        fetches = [asyncio.create_task(target.fetch(source, names)) for names in (NAMES, NAMES, ("a", "b", "x"))]
        await source.gate.until_reached()
        source.gate.open()
        replies = await asyncio.gather(*fetches)
        assert [reply.num_stored for reply in replies] == [4, 4, 3]
        assert sum(reply.num_bytes for reply in replies) == source.exchange.num_bytes_sent == 5 * BLOCK_BYTES
        target.check(NAMES, kv)


async def test_whoever_waited_for_a_call_that_was_cancelled_fetches_by_himself() -> None:
    async with node() as source, node() as target:
        kv = source.keep(NAMES)
        source.gate.shut(1)
        first = asyncio.create_task(target.fetch(source, NAMES))
        await source.gate.until_reached()
        second = asyncio.create_task(target.fetch(source, NAMES))
        first.cancel()
        with pytest.raises((asyncio.CancelledError, RequestCancelledError)):
            await first
        await eventually(lambda: asyncio.sleep(0, has(target)), lambda held: held <= {"a"})
        source.gate.open()
        assert (await second).num_stored == 4
        target.check(NAMES, kv)


async def test_a_cancelled_fetch_leaves_whole_blocks_and_nothing_else() -> None:
    async with node() as source, node() as target:
        source.keep(NAMES)
        source.gate.shut(2)
        fetching = asyncio.create_task(target.fetch(source, NAMES))
        await source.gate.until_reached()
        fetching.cancel()
        with pytest.raises((asyncio.CancelledError, RequestCancelledError)):
            await fetching
        await eventually(lambda: asyncio.sleep(0, len(target.exchange._coming)), lambda held: held == 0)
        # as far as they had come; a thread ends what it writes
        await eventually(lambda: asyncio.sleep(0, has(target)), lambda held: held <= {"a", "b"})


async def until_fetched(target: Node, num_blocks: int) -> None:
    async def fetched() -> int:
        return target.exchange.num_bytes_fetched

    await eventually(fetched, lambda num_bytes: num_bytes == num_blocks * BLOCK_BYTES)


async def test_a_fetch_that_comes_too_late_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines = Deadlines(monkeypatch, block_exchange)
    async with node() as source, node() as target:
        kv = source.keep(NAMES)
        source.gate.shut(2)
        fetching = asyncio.create_task(target.fetch(source, NAMES, within_s=40.0))
        await until_fetched(target, 2)
        deadlines.let_pass()
        reply = await fetching
        assert (reply.num_stored, reply.num_bytes) == (2, 2 * BLOCK_BYTES)
        assert "after 40.000 s" in reply.shortfall
        assert has(target) == {"a", "b"}
        target.check(("a", "b"), kv)


async def test_a_source_that_dies_in_the_middle_leaves_whole_blocks() -> None:
    async with node() as target:
        async with node() as source:
            source.keep(NAMES)
            source.gate.shut(2)
            fetching = asyncio.create_task(target.fetch(source, NAMES))
            await until_fetched(target, 2)
            await source.server.stop(grace=0)
            reply = await fetching
        assert (reply.num_stored, reply.missing_block) == (2, "")
        assert reply.shortfall
        assert has(target) == {"a", "b"}
        gone = await target.fetch(source, NAMES)
        assert gone.num_stored == 2 and "UNAVAILABLE" in gone.shortfall


async def test_a_block_that_the_source_does_not_have_is_named() -> None:
    async with node() as source, node() as target:
        source.keep(NAMES[:2])
        reply = await target.fetch(source, NAMES)
        assert (reply.num_stored, reply.missing_block) == (2, "c")
        assert has(target) == {"a", "b"}


async def test_a_node_without_room_keeps_what_it_has() -> None:
    async with node() as source, node(limit_bytes=3 * FILE_BYTES) as target:
        kv = source.keep(NAMES)
        target.keep(NAMES[:1])
        target.keep(("other",), seed=1)
        reply = await target.fetch(source, NAMES)  # evicts the other prompt's block, and none of this prompt's
        assert (reply.num_stored, list(reply.evicted)) == (3, ["other"])
        assert "no room for block d" in reply.shortfall
        assert has(target) == {"a", "b", "c"}
        target.check(("a", "b", "c"), kv)


class Spoiling(BlockExchange):
    """Sends the third block damaged."""

    async def read(
        self, request: exchange_pb2.ReadBlocksRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        number = 0
        async for frame in super().read(request, context):
            number += 1
            yield frame if number != 3 else frame[:-1] + bytes([frame[-1] ^ 1])


def spoiling(blocks: GatedBlocks) -> BlockExchange:
    return Spoiling(blocks, clock=SystemClock())


async def test_a_damaged_block_is_not_stored() -> None:
    async with node(exchange=spoiling) as source, node() as target:
        kv = source.keep(NAMES)
        reply = await target.fetch(source, NAMES)
        assert reply.num_stored == 2
        assert "block c, layer 0: the payload was damaged" in reply.shortfall
        assert has(target) == {"a", "b"}
        target.check(("a", "b"), kv)


async def test_kv_of_another_layout_is_refused() -> None:
    other = KvLayout("other weights", num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32")
    async with node(layout=other) as source, node() as target:
        source.keep(NAMES)
        reply = await target.fetch(source, NAMES)
        assert reply.num_stored == 0 and "run the same model" in reply.shortfall


@pytest.mark.parametrize(
    ("field", "value"),
    [("endpoint", ""), ("block_tokens", 0), ("within_s", 0.0), ("within_s", float("nan")), ("within_s", float("inf"))],
)
async def test_a_bad_field_is_named(field: str, value: Any) -> None:
    request = exchange_pb2.FetchBlocksRequest(endpoint="127.0.0.1:9", names=NAMES, block_tokens=BLOCK, within_s=1.0)
    setattr(request, field, value)
    async with node() as target:
        with pytest.raises(InvalidArgumentError, match=field), translate_rpc_errors():
            await BlockExchangeStub(target.channel).Fetch(request)
