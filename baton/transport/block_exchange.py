"""Server of the gRPC service baton.v1.BlockExchange, which copies cached blocks of KV between the prefix stores of
nodes.

The orchestrator calls Fetch on a worker of the node where a request will run. This worker calls Read on a worker of the
node that has the blocks (`baton.transport.block_pieces`). The store is an interface (`baton.transport.block_store`).
The exchange runs on the process's asyncio loop. It calls the store's methods in a thread pool, because these methods
wait for locks and disks. A call keeps one block in memory at a time. At most `_MOST_AT_ONCE` calls of each kind run at
the same time; further calls wait.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from functools import partial
from itertools import takewhile
from operator import methodcaller
from typing import Any, TypeVar

import grpc

from baton.errors import BatonError, InvalidArgumentError, LayoutMismatchError, ResourceExhaustedError, StalePrefixError
from baton.process.clock import Clock
from baton.transport.block_pieces import SERVICE, BlockAssembly, BlockRun, frames_of, read_blocks
from baton.transport.block_store import BlockStore
from baton.transport.channel import make_channel
from baton.transport.channel_cache import ChannelCache
from baton.v1 import exchange_pb2

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Connect = Callable[[str], grpc.aio.Channel]
"""Function that creates a channel to the address host:port."""
Result = TypeVar("Result")

_MOST_AT_ONCE = 2
"""Maximum number of Fetch calls that copy blocks at the same time, and of Read calls that send blocks at the same time.
Each of these calls keeps one block in memory."""


class BlockExchange:
    """Serves the block exchange of one worker. Create it on the asyncio loop, and register it with `add_to`. Call
    `close` after the server has stopped."""

    def __init__(self, store: BlockStore, *, clock: Clock, connect: Connect = make_channel) -> None:
        self.num_bytes_fetched = 0
        """Number of bytes of KV that have been fetched into this node's store."""
        self.num_bytes_sent = 0
        """Number of bytes of KV that have been sent from this node's store."""
        self._store = store
        self._clock = clock
        self._channels = ChannelCache(connect)
        self._coming: dict[str, asyncio.Event] = {}
        """Events by name of the block that a running call is copying. The event of a block is set when the block is
        stored or copying it has failed."""
        self._copying = asyncio.Semaphore(_MOST_AT_ONCE)
        self._sending = asyncio.Semaphore(_MOST_AT_ONCE)
        self._threads = ThreadPoolExecutor(_MOST_AT_ONCE, thread_name_prefix="block-exchange")

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the methods Fetch and Read with the server, before it starts. Read has no serializer, because its
        replies are already encoded."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Read": grpc.unary_stream_rpc_method_handler(self.read, exchange_pb2.ReadBlocksRequest.FromString, bytes),
            "Fetch": grpc.unary_unary_rpc_method_handler(
                self.fetch, exchange_pb2.FetchBlocksRequest.FromString, methodcaller("SerializeToString")
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def close(self) -> None:
        """Wait until no thread works for the exchange, and close its channels. Call once, after the last call has
        ended."""
        await self._channels.close()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    async def read(self, request: exchange_pb2.ReadBlocksRequest, context: Context) -> AsyncIterator[bytes]:
        """Serve Read: yield the requested blocks as encoded pieces, one block after another. Each piece is a copy of
        the block's memory.

        Raises StalePrefixError at the first block that is not in the store, LayoutMismatchError if the caller's KV
        layout differs from the store's, and InvalidArgumentError for an invalid field.
        """
        layout = self._store.layout
        if request.layout_fingerprint != layout.fingerprint:
            raise LayoutMismatchError(
                f"the caller's KV layout is {request.layout_fingerprint[:32]!r}, this store's is "
                f"{layout.fingerprint!r}: run the same model and dtype on both sides"
            )
        run = BlockRun(tuple(request.names), _block_tokens(request.block_tokens), request.first_token)
        async with self._sending:
            for name, tokens in run.parts():
                block = await self._on_thread(partial(self._store.open_block, name, tokens))
                for frame in frames_of(block, layout, tokens):
                    yield frame
                self.num_bytes_sent += len(tokens) * layout.token_bytes
                del block  # lets the store evict it

    async def fetch(self, request: exchange_pb2.FetchBlocksRequest, context: Context) -> exchange_pb2.FetchBlocksReply:
        """Serve Fetch: from the worker that the request names, copy the requested blocks that this node's store lacks.
        The reply contains the number of leading blocks of the request that are stored afterwards.

        If copying fails, the reply contains the reason, and blocks that were already copied stay in the store. Raises
        InvalidArgumentError for an invalid field.
        """
        block_tokens, within_s = _block_tokens(request.block_tokens), request.within_s
        if not request.endpoint:
            raise InvalidArgumentError("endpoint is empty: name a worker of the node that has the blocks")
        if not 0 < within_s < math.inf:  # also false for NaN
            raise InvalidArgumentError(f"within_s = {within_s} is out of range: use seconds above 0")
        reply = exchange_pb2.FetchBlocksReply()
        try:
            async with asyncio.timeout(within_s):
                await self._bring(request.endpoint, BlockRun(tuple(request.names), block_tokens, 0), reply)
        except TimeoutError:
            reply.shortfall = f"not all blocks had come from {request.endpoint} after {within_s:.3f} s"
        except StalePrefixError as stale:
            reply.missing_block, reply.shortfall = request.names[reply.num_stored], str(stale)
        except (BatonError, OSError) as error:
            reply.shortfall = str(error) or repr(error)
        if reply.shortfall:
            logger.info("fetched %d of %d blocks: %s", reply.num_stored, len(request.names), reply.shortfall)
        return reply

    async def _bring(self, endpoint: str, run: BlockRun, reply: exchange_pb2.FetchBlocksReply) -> None:
        """Count the blocks that the store has, wait for blocks that other calls are copying, and copy the remaining
        ones. Results are written into `reply`."""
        while reply.num_stored < len(run.names):
            names = run.names[reply.num_stored :]
            if (coming := self._coming.get(names[0])) is not None:
                await coming.wait()
                continue
            num_there = await self._on_thread(partial(self._store.num_leading, names))
            if num_there:
                reply.num_stored += num_there
                continue
            async with self._copying:
                with self._claimed(names) as claimed:
                    # Another call may have copied the first block since it was found missing.
                    if claimed and not await self._on_thread(partial(self._store.num_leading, claimed[:1])):
                        first_token = reply.num_stored * run.block_tokens
                        part = BlockRun(claimed, run.block_tokens, first_token)
                        await self._copy(endpoint, part, spared=run.names, reply=reply)

    @contextmanager
    def _claimed(self, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Claim the leading blocks that no other call is copying, until they are stored or their copying has failed.
        Yield their names."""
        claimed = {name: asyncio.Event() for name in takewhile(lambda name: name not in self._coming, names)}
        self._coming.update(claimed)
        try:
            yield tuple(claimed)
        finally:
            for name, coming in claimed.items():
                if self._coming.get(name) is coming:  # else it was settled, and another call may have claimed it since
                    self._settle(name)

    def _settle(self, name: str) -> None:
        """Wake the calls that wait for a block, after it was stored or its copying has failed."""
        self._coming.pop(name).set()

    async def _copy(
        self, endpoint: str, run: BlockRun, *, spared: Sequence[str], reply: exchange_pb2.FetchBlocksReply
    ) -> None:
        """Copy blocks from the worker at `endpoint`. Blocks named in `spared` are not evicted to make room. Raises
        ResourceExhaustedError when the store has no room."""
        start_s = self._clock.now_s()
        try:
            async with (
                self._channels.use(endpoint) as channel,
                aclosing(read_blocks(channel, self._store.layout, run)) as blocks,
            ):
                async for block in blocks:
                    await self._put(block, spared, reply)
                    self._settle(block.name)
        finally:
            reply.copying_s += self._clock.now_s() - start_s

    async def _put(self, block: BlockAssembly, spared: Sequence[str], reply: exchange_pb2.FetchBlocksReply) -> None:
        put = partial(self._store.put_block, block.name, block.tokens, block.pieces, spared)
        is_stored, evicted = await self._on_thread(put)
        reply.evicted.extend(evicted)
        if not is_stored:
            raise ResourceExhaustedError(f"the prefix store has no room for block {block.name}")
        num_bytes = sum(data.nbytes for _, _, data in block.pieces)
        block.pieces.clear()  # before the next block comes
        self.num_bytes_fetched += num_bytes
        reply.num_bytes += num_bytes
        reply.num_stored += 1

    async def _on_thread(self, work: Callable[[], Result]) -> Result:
        """Run `work` on a thread and return its result. If the call is cancelled, work that has begun still runs to its
        end."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _block_tokens(block_tokens: int) -> int:
    if not block_tokens:
        raise InvalidArgumentError("block_tokens = 0 is out of range: say how many tokens a block has")
    return block_tokens
