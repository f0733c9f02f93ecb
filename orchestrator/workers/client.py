"""Calls workers: their methods in Baton's values, over shared channels that are closed when a worker is gone.

Used by `orchestrator.dispatch`, `orchestrator.workers.worker_poller` and `orchestrator.workers.prefix_discovery`. Only
the caller ends a call, and only the orchestrator sets its timeout. So a call that a worker cancelled, or that took too
long, raises UnavailableError. On the loop.
"""

import asyncio
import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial

import grpc

from baton.calls.cluster_state import GenerationStatus, PrefillStatus
from baton.errors import BatonError, DeadlineExceededError, RequestCancelledError, UnavailableError
from baton.proto_types import event_from_proto, rank_timing_from_proto, read
from baton.results.prefill_trace import RankTiming
from baton.transport.channel import make_channel
from baton.transport.identity import ClusterSecret
from baton.transport.kv_client import KvClient
from baton.transport.status_interceptor import translate_rpc_errors
from baton.types import Lease, StreamNumber, TokenEvent
from baton.v1 import common_pb2, exchange_pb2, generate_pb2, prefill_pb2
from baton.v1.exchange_pb2_grpc import BlockExchangeStub
from baton.v1.generate_pb2_grpc import GenerationGroupStub
from baton.v1.prefill_pb2_grpc import PrefillRankStub
from orchestrator.placement.block_fetches import BlockFetch
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.record import RequestRecord
from orchestrator.workers.messages import PrefillJob, stream_request, takeover_request
from orchestrator.workers.streams import SharedStreams, StreamPart

VERB_TIMEOUT_S = 5.0
"""Timeout of calls that a healthy worker answers at once, in seconds."""
_REPORT_S = 0.5
"""Seconds that a worker has to report a fetch whose time is over."""


@dataclass(frozen=True)
class RankReport:
    """One rank's report of a finished job."""

    timing: RankTiming
    stored: tuple[str, ...]
    """Names of blocks that the node's prefix store holds now, of those that were to be kept: the first ones."""
    evicted: tuple[str, ...]
    """Names of blocks that were evicted to make room for the stored ones."""


@dataclass(frozen=True)
class FetchReport:
    """Report of a worker on a fetch of cached KV."""

    num_stored: int = 0
    """Number of blocks that its node's prefix store has now, of those that were named: the first ones."""
    evicted: tuple[str, ...] = ()
    """Names of blocks that were evicted to make room."""
    num_bytes: int = 0
    """Bytes of KV that were copied."""
    copying_s: float = 0.0
    """Seconds that it took to copy them."""
    shortfall: str = ""
    """Reason why not all blocks are stored, in one line; empty when all are."""
    missing_block: str = ""
    """Name of the block that the other node did not have; empty for any other failure."""


class AttemptEvents:
    """The events of one attempt, as its generation group sends them."""

    def __init__(self, call: StreamPart, endpoint: str) -> None:
        self.stored: tuple[str, ...] = ()
        """Names of the answers' blocks that the group's prefix store holds; known once the stream is closed."""
        self.evicted: tuple[str, ...] = ()
        """Names of blocks that were evicted to make room for the stored ones."""
        self._call = call
        self._endpoint = endpoint

    async def read(self) -> TokenEvent:
        """Return the next event; must not be called after the last. A cancelled read ends the stream."""
        try:
            message = await self._call.read()
        except (RequestCancelledError, DeadlineExceededError) as error:
            raise UnavailableError(f"the worker at {self._endpoint} gave a stream up: {error}") from error
        if message is None:
            raise UnavailableError(f"generation group at {self._endpoint} closed a stream without a last event")
        return event_from_proto(message)

    async def closed(self, timeout_s: float) -> None:
        """Wait until the group has closed the stream, after its last event and its report of stored blocks, or until
        `timeout_s` seconds have passed. Raises nothing."""
        with contextlib.suppress(TimeoutError, BatonError):  # all tokens have come
            async with asyncio.timeout(timeout_s):
                while (message := await self._call.read()) is not None:
                    self.stored += tuple(message.stored.stored)
                    self.evicted += tuple(message.stored.evicted)

    def cancel(self) -> None:
        """Stop reading; the group keeps the stream running for its ttl. Idempotent."""
        self._call.cancel()


class WorkerClient(KvClient):
    """Calls one worker, of either role; the lease verbs are for generation groups."""

    def __init__(self, endpoint: str, channel: grpc.aio.Channel) -> None:
        super().__init__(channel, timeout_s=VERB_TIMEOUT_S, errors=partial(_worker_errors, endpoint))
        self.num_users = 0
        """Number of contexts of `Clients.use` that have it."""
        self._endpoint = endpoint
        self._channel = channel
        self._prefill = PrefillRankStub(channel)
        self._generation = GenerationGroupStub(channel)
        self._exchange = BlockExchangeStub(channel)
        self._streams = SharedStreams(channel)

    def stream(
        self, record: RequestRecord, number: StreamNumber, config: OrchestratorConfig, lease: Lease | None
    ) -> AttemptEvents:
        """Open the attempt's stream, which outlives this process by a lease's ttl; its answers are stored in blocks.
        Without a lease the group prefills by itself."""
        request = stream_request(record, number, config, lease)
        return AttemptEvents(self._streams.open(request), self._endpoint)

    def take_over(self, record: RequestRecord, number: StreamNumber) -> AttemptEvents:
        """Open a stream that the group has kept; reading it raises NotFoundError when the group has not."""
        return AttemptEvents(self._streams.open(takeover_request(record, number)), self._endpoint)

    async def close(self) -> None:
        """End all streams and close the channel; to be called once no stream is read."""
        await self._streams.close()
        await self._channel.close()

    async def cancel(self, number: StreamNumber) -> None:
        """End the stream of that number; idempotent."""
        request = generate_pb2.CancelRequest(number=number)
        with self._errors():
            await self._generation.Cancel(request, timeout=VERB_TIMEOUT_S)

    async def run(self, job: PrefillJob) -> RankReport:
        """Run this rank's chunk and return its report.

        Returns when the chunk is computed, passed on, pushed and, on the last rank, stored. Raises StalePrefixError
        when the blocks behind which the chain begins are not cached.
        """
        with self._errors():
            report = await self._prefill.Run(job.message)
        return RankReport(
            rank_timing_from_proto(report.timing), tuple(report.stored_blocks), tuple(report.evicted_blocks)
        )

    async def generation_status(self, timeout_s: float) -> GenerationStatus:
        """Return what this generation group holds and does now."""
        with self._errors():
            return await self._generation.GetStatus(generate_pb2.GenerationStatusRequest(), timeout=timeout_s)

    async def prefix_blocks(self, *, is_prefill: bool) -> list[str]:
        """Return the names of the blocks in the prefix store of this worker's node, the least recently used first."""
        ask = self._prefill.ListPrefixBlocks if is_prefill else self._generation.ListPrefixBlocks
        with self._errors():
            reply = await ask(common_pb2.ListPrefixBlocksRequest(), timeout=VERB_TIMEOUT_S)
        return list(reply.blocks)

    async def fetch_blocks(self, fetch: BlockFetch) -> FetchReport:
        """Let this worker fetch blocks into its node's prefix store, and return its report. The worker stops early
        enough to report soon after `fetch.within_s` seconds."""
        request = exchange_pb2.FetchBlocksRequest(
            endpoint=fetch.source.endpoint,
            names=fetch.names,
            block_tokens=fetch.block_tokens,
            within_s=fetch.within_s,
        )
        with self._errors():
            reply = await self._exchange.Fetch(request, timeout=fetch.within_s + _REPORT_S)
        return read(FetchReport, reply, evicted=tuple(reply.evicted))

    async def prefill_status(self, timeout_s: float) -> PrefillStatus:
        """Return what this prefill rank holds and does now."""
        with self._errors():
            return await self._prefill.GetStatus(prefill_pb2.PrefillStatusRequest(), timeout=timeout_s)


class Clients:
    """A client for each endpoint, made at first use. Closing a channel ends its calls, so channels in use are kept."""

    def __init__(self, secret: ClusterSecret) -> None:
        """`secret` is the cluster's secret, sent with each call."""
        self._secret = secret
        self._clients: dict[str, WorkerClient] = {}

    @contextlib.contextmanager
    def use(self, endpoint: str) -> Iterator[WorkerClient]:
        """Return a context with the client of the worker at host:port, which connects at its first call."""
        client = self._clients.get(endpoint)
        if client is None:
            client = self._clients[endpoint] = WorkerClient(endpoint, make_channel(endpoint, secret=self._secret))
        client.num_users += 1
        try:
            yield client
        finally:
            client.num_users -= 1

    async def prune(self, present: Collection[str]) -> None:
        """Close the clients of endpoints that are neither present nor in use."""
        gone = [each for each, client in self._clients.items() if each not in present and not client.num_users]
        for client in [self._clients.pop(endpoint) for endpoint in gone]:
            await client.close()


@contextlib.contextmanager
def _worker_errors(endpoint: str) -> Iterator[None]:
    """Translate a call's errors: one that the worker cancelled or left unanswered raises UnavailableError."""
    try:
        with translate_rpc_errors():
            yield
    except (RequestCancelledError, DeadlineExceededError) as error:
        raise UnavailableError(f"the worker at {endpoint} did not complete a call: {error}") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise UnavailableError(f"the worker at {endpoint} cancelled a call") from error  # grpc.aio's report of it
