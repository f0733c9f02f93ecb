"""Nodes that exchange blocks of cached KV. Each has a store in its own folder, and a real server on loopback."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import torch

from baton.modeling.kv.buffers import KvBuffer
from baton.modeling.prefix_store.store import PrefixStore
from baton.process.clock import SystemClock
from baton.transport.block_exchange import BlockExchange
from baton.transport.channel import bind, make_channel, make_server
from baton.transport.status_interceptor import translate_rpc_errors
from baton.types import KvLayout, TokenRange
from baton.v1 import exchange_pb2
from baton.v1.exchange_pb2_grpc import BlockExchangeStub
from tests.support.engines.prefixes import PLENTY, keep, prefix_folder

LAYOUT = KvLayout("weights", num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32")
BLOCK = 4
TIMEOUT_S = 20.0


class GatedBlocks:
    """Wrapper of a store whose blocks are opened only while its gate is open. A shut gate still passes the first few
    blocks."""

    def __init__(self, store: PrefixStore) -> None:
        self.layout, self.num_leading, self.put_block = store.layout, store.num_leading, store.put_block
        self._store = store
        self.reached = threading.Event()
        self._opened = threading.Event()
        self._num_passes = 1 << 30

    def shut(self, num_passes: int) -> None:
        """Shut the gate after `num_passes` more blocks."""
        self._num_passes = num_passes

    def open(self) -> None:
        self._opened.set()

    async def until_reached(self) -> None:
        """Wait until a block is requested at the shut gate."""
        assert await asyncio.to_thread(self.reached.wait, TIMEOUT_S)

    def open_block(self, name: str, tokens: TokenRange) -> KvBuffer:
        self._num_passes -= 1
        if self._num_passes < 0:
            self.reached.set()
            assert self._opened.wait(TIMEOUT_S), "the test left the gate shut"
        return self._store.open_block(name, tokens)


Exchange = Callable[[GatedBlocks], BlockExchange]


def plain(blocks: GatedBlocks) -> BlockExchange:
    return BlockExchange(blocks, clock=SystemClock())


@dataclass
class Node:
    """A node: its store, and the server through which it exchanges blocks."""

    store: PrefixStore
    gate: GatedBlocks
    exchange: BlockExchange
    server: grpc.aio.Server
    endpoint: str
    channel: grpc.aio.Channel

    def keep(self, names: Sequence[str], seed: int = 0, block_tokens: int = BLOCK) -> KvBuffer:
        """Store a prompt's KV, which depends only on the seed, in blocks called `names`. Return the KV."""
        kv = prompt_kv(self.store.layout, len(names) * block_tokens, seed)
        keep(self.store, kv, names)
        return kv

    async def fetch(
        self, source: "Node", names: Sequence[str], within_s: float = TIMEOUT_S, block_tokens: int = BLOCK
    ) -> exchange_pb2.FetchBlocksReply:
        request = exchange_pb2.FetchBlocksRequest(
            endpoint=source.endpoint, names=names, block_tokens=block_tokens, within_s=within_s
        )
        with translate_rpc_errors():
            return await BlockExchangeStub(self.channel).Fetch(request, timeout=TIMEOUT_S)

    def check(self, names: Sequence[str], kv: KvBuffer, block_tokens: int = BLOCK) -> None:
        """Check that the store has the blocks `names`, and that they contain `kv`."""
        for index, block in enumerate(self.store.open(names, block_tokens)):
            start = index * block_tokens
            assert torch.equal(block.data, kv.data[:, start : start + block_tokens])


def prompt_kv(layout: KvLayout, num_tokens: int, seed: int = 0) -> KvBuffer:
    """Return KV whose elements differ. The KV of a token depends only on its position and the seed."""
    kv = KvBuffer(layout, TokenRange(0, num_tokens))
    rows_SLR = kv.data.view(layout.num_layers, num_tokens, -1).transpose(0, 1)
    num_elements = rows_SLR[0].numel()
    first_S = torch.arange(num_tokens).view(-1, 1, 1) * num_elements + 1_000_003 * seed
    rows_SLR.copy_(first_S + torch.arange(num_elements).view(rows_SLR[0].shape))
    return kv


@asynccontextmanager
async def node(
    *, layout: KvLayout = LAYOUT, limit_bytes: int = PLENTY, exchange: Exchange = plain
) -> AsyncIterator[Node]:
    """Run a node. At the end, check that no block of its store is mapped or partially written."""
    with prefix_folder() as folder:
        store = PrefixStore(folder, layout, limit_bytes=limit_bytes, clock=SystemClock())
        gate, server = GatedBlocks(store), make_server()
        made = exchange(gate)
        made.add_to(server)
        endpoint = f"127.0.0.1:{bind(server, '127.0.0.1')}"
        await server.start()
        try:
            async with make_channel(endpoint) as channel:
                yield Node(store, gate, made, server, endpoint, channel)
        finally:
            gate.open()
            await server.stop(grace=0)
            await made.close()
