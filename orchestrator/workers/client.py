"""gRPC client of the workers. Its methods take and return Baton's own types. Each worker has one channel, which is
closed when the worker no longer exists.

Used by `orchestrator.dispatch`, `orchestrator.workers.worker_poller` and `orchestrator.workers.prefix_discovery`. A
healthy worker never cancels a call, and only the orchestrator sets timeouts. So a call that the worker cancels, or that
times out, raises UnavailableError. Runs on the event loop.
"""

import asyncio
import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial

import grpc

from baton.calls.cluster_state import GenerationStatus, PrefillStatus
from baton.errors import BatonError, DeadlineExceededError, RequestCancelledError, UnavailableError
from baton.proto_types import rank_timing_from_proto, read
from baton.results.prefill_trace import RankTiming
from baton.transport.channel import make_channel
from baton.transport.identity import ClusterSecret
from baton.transport.kv_client import KvClient
from baton.transport.status_interceptor import translate_rpc_errors
from baton.transport.terms import NO_TERM
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
"""Timeout in seconds of calls that a healthy worker answers immediately."""
_REPORT_S = 0.5
"""Additional seconds that a worker has to report the result of a fetch, after the fetch's time limit has passed."""


@dataclass(frozen=True)
class RankReport:
    """Report of one prefill rank about a finished job."""

    timing: RankTiming
    stored: tuple[str, ...]
    """Names of the prompt's blocks that this job has added to the node's prefix store. If the store did not have room
    for all blocks, these are the leading ones."""
    evicted: tuple[str, ...]
    """Names of the blocks that the prefix store has evicted to make room for the new blocks."""


@dataclass(frozen=True)
class FetchReport:
    """Worker's report about a fetch of cached KV from another node."""

    num_stored: int = 0
    """Number of requested blocks, counted from the first one, that the prefix store of the worker's node now has."""
    evicted: tuple[str, ...] = ()
    """Names of the blocks that the prefix store has evicted to make room for the fetched blocks."""
    num_bytes: int = 0
    """Number of KV bytes that were copied."""
    copying_s: float = 0.0
    """Seconds that the worker took to copy the blocks from the other node."""
    shortfall: str = ""
    """Reason, in one line, why some of the blocks were not stored; empty if all blocks are stored."""
    missing_block: str = ""
    """Name of the first block that the other node did not have. Empty if the fetch succeeded, or if it failed for
    another reason."""


class AttemptEvents:
    """Stream of the events of one attempt, as its generation group sends them."""

    def __init__(self, call: StreamPart, endpoint: str) -> None:
        self.stored: tuple[str, ...] = ()
        """Names of the answers' KV blocks that the group has stored in its prefix store. The list is complete when the
        stream is closed."""
        self.evicted: tuple[str, ...] = ()
        """Names of the blocks that the prefix store has evicted to make room for the new blocks."""
        self._call = call
        self._endpoint = endpoint

    async def read(self) -> TokenEvent:
        """Return the next event. Must not be called after the last event. If this call is cancelled, the stream is
        closed."""
        try:
            message = await self._call.read()
        except (RequestCancelledError, DeadlineExceededError) as error:
            raise UnavailableError(f"the worker at {self._endpoint} gave a stream up: {error}") from error
        if not isinstance(message, TokenEvent):
            raise UnavailableError(f"generation group at {self._endpoint} closed a stream without a last event")
        return message

    async def closed(self, timeout_s: float) -> None:
        """Wait until the group closes the stream, for at most `timeout_s` seconds, and read the group's report of
        stored blocks. Call it after the last event. Raises no errors."""
        with contextlib.suppress(TimeoutError, BatonError):  # all tokens have arrived already
            async with asyncio.timeout(timeout_s):
                while isinstance(message := await self._call.read(), generate_pb2.StoredBlocks):
                    self.stored += tuple(message.stored)
                    self.evicted += tuple(message.evicted)

    def cancel(self) -> None:
        """Stop reading the stream. The group keeps the stream running until the stream's TTL expires. Idempotent."""
        self._call.cancel()


class WorkerClient(KvClient):
    """Client of one worker, either a prefill rank or a generation group. The methods for leases apply to generation
    groups only."""

    def __init__(self, endpoint: str, channel: grpc.aio.Channel) -> None:
        super().__init__(channel, timeout_s=VERB_TIMEOUT_S, errors=partial(_worker_errors, endpoint))
        self.num_users = 0
        """Number of open `Clients.use` contexts that use this client."""
        self._endpoint = endpoint
        self._channel = channel
        self._prefill = PrefillRankStub(channel)
        self._generation = GenerationGroupStub(channel)
        self._exchange = BlockExchangeStub(channel)
        self._streams = SharedStreams(channel)

    def stream(
        self, record: RequestRecord, number: StreamNumber, config: OrchestratorConfig, lease: Lease | None
    ) -> AttemptEvents:
        """Open the stream of an attempt at a request. If the orchestrator ends, the group keeps the stream for the TTL
        of a lease.

        `lease` is the lease on the slots that receive the KV. If it is None, the group prefills by itself. The KV
        blocks of the answers are stored in the group's prefix store.
        """
        request = stream_request(record, number, config, lease)
        return AttemptEvents(self._streams.open(request), self._endpoint)

    def take_over(self, record: RequestRecord, number: StreamNumber) -> AttemptEvents:
        """Open a stream that the group has kept since an earlier orchestrator ended. If the group has not kept the
        stream, reading it raises NotFoundError."""
        return AttemptEvents(self._streams.open(takeover_request(record, number)), self._endpoint)

    async def close(self) -> None:
        """End all streams and close the channel. Call it only when no stream is being read."""
        await self._streams.close()
        await self._channel.close()

    async def cancel(self, number: StreamNumber) -> None:
        """End the stream with this number. Idempotent."""
        request = generate_pb2.CancelRequest(number=number)
        with self._errors():
            await self._generation.Cancel(request, timeout=VERB_TIMEOUT_S)

    async def run(self, job: PrefillJob) -> RankReport:
        """Run this rank's chunk of the prefill job, and return the rank's report.

        Returns when the chunk has been computed and its KV has been passed to the next rank and pushed to the slots. On
        the last rank, the KV blocks have also been stored in the prefix store. Raises StalePrefixError if the cached
        blocks after which the chain starts are missing.
        """
        with self._errors():
            report = await self._prefill.Run(job.message)
        return RankReport(
            rank_timing_from_proto(report.timing), tuple(report.stored_blocks), tuple(report.evicted_blocks)
        )

    async def generation_status(self, timeout_s: float) -> GenerationStatus:
        """Return the present status of this generation group. Fails after `timeout_s` seconds."""
        with self._errors():
            return await self._generation.GetStatus(generate_pb2.GenerationStatusRequest(), timeout=timeout_s)

    async def prefix_blocks(self, *, is_prefill: bool) -> list[str]:
        """Return the names of the blocks in the prefix store of this worker's node. The least recently used block comes
        first."""
        ask = self._prefill.ListPrefixBlocks if is_prefill else self._generation.ListPrefixBlocks
        with self._errors():
            reply = await ask(common_pb2.ListPrefixBlocksRequest(), timeout=VERB_TIMEOUT_S)
        return list(reply.blocks)

    async def fetch_blocks(self, fetch: BlockFetch) -> FetchReport:
        """Make this worker fetch blocks from another node into the prefix store of its own node. Return the worker's
        report. The worker stops copying after `fetch.within_s` seconds, so that it can report in time."""
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
        """Return the present status of this prefill rank. Fails after `timeout_s` seconds."""
        with self._errors():
            return await self._prefill.GetStatus(prefill_pb2.PrefillStatusRequest(), timeout=timeout_s)


class Clients:
    """Clients of the workers, by endpoint. A client is created at its first use. Closing a channel ends its calls, so a
    client in use is not closed."""

    def __init__(self, secret: ClusterSecret, term: int = NO_TERM) -> None:
        """Create an empty collection of clients. `secret` is the cluster's secret, and `term` the orchestrator's term.
        Both are sent with each call."""
        self._make_channel = partial(make_channel, secret=secret, term=term)
        self._clients: dict[str, WorkerClient] = {}

    @contextlib.contextmanager
    def use(self, endpoint: str) -> Iterator[WorkerClient]:
        """Open a context, and yield the client of the worker at `endpoint` (host:port). The client is not closed while
        the context is open. It connects at its first call."""
        client = self._clients.get(endpoint)
        if client is None:
            client = self._clients[endpoint] = WorkerClient(endpoint, self._make_channel(endpoint))
        client.num_users += 1
        try:
            yield client
        finally:
            client.num_users -= 1

    async def prune(self, present: Collection[str]) -> None:
        """Close each client that is not in use and whose worker no longer exists. `present` are the endpoints of the
        existing workers."""
        gone = [each for each, client in self._clients.items() if each not in present and not client.num_users]
        for client in [self._clients.pop(endpoint) for endpoint in gone]:
            await client.close()


@contextlib.contextmanager
def _worker_errors(endpoint: str) -> Iterator[None]:
    """Translate the errors of a call. A call that the worker cancels or does not answer raises UnavailableError."""
    try:
        with translate_rpc_errors():
            yield
    except (RequestCancelledError, DeadlineExceededError) as error:
        raise UnavailableError(f"the worker at {endpoint} did not complete a call: {error}") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise UnavailableError(f"the worker at {endpoint} cancelled a call") from error  # grpc.aio reports it this way
