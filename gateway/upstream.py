"""gRPC client of the server behind the gateway. It gets the served model, the server's health, the cluster's state, and
streams of tokens. Runs on the asyncio loop."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from typing import Self

from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.calls.cluster_state import ClusterState
from baton.calls.streams import AsyncStream
from baton.client import AsyncClient
from baton.errors import BatonError, RequestCancelledError, UnavailableError
from baton.limits import MAX_PENDING_EVENTS, MAX_REQUEST_ID_CHARS
from baton.results.completion import Completion, ModelInfo, Usage
from baton.results.request_list import RequestList
from baton.rpc_status import translate_rpc_errors
from baton.transport.channel import make_channel
from baton.types import TokenEvent
from gateway.reading import Asked

_SERVICE = "baton.v1.Orchestrator"
_ANSWER_S = 5.0
"""Timeout in seconds for the server's answer about its health, its state or its requests."""


class Upstream:
    """Client with connections to one server. It must be made on the loop that uses it, and closed at the end."""

    def __init__(self, target: str, deadline_s: float = 0.0) -> None:
        """Make a client of the server at `target` (host:port). No connection is made yet. `deadline_s` is the timeout
        of each request in seconds; 0: no timeout."""
        self.target = target
        self._deadline_s = deadline_s or None
        self._is_closed = False
        self._client = AsyncClient(target)
        self._health = make_channel(target)

    async def close(self) -> None:
        """Close the connections. Calls and streams that still run end with UnavailableError. Idempotent."""
        self._is_closed = True
        await self._client.close()
        await self._health.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def model(self, metadata: Mapping[str, str]) -> ModelInfo:
        """Return the served model. Raises the server's error if the server refuses the call, and UnavailableError if it
        does not answer."""
        with self.unless_closed():
            return await self._client.model(metadata=metadata)

    async def state(self, metadata: Mapping[str, str]) -> ClusterState:
        """Return the cluster's state. Raises the server's error if the server refuses the call, and UnavailableError if
        it does not answer."""
        with self.unless_closed():
            return await self._client.cluster_state(_ANSWER_S, metadata=metadata)

    async def requests(self, num_ended: int, metadata: Mapping[str, str]) -> RequestList:
        """Return the requests that wait or run, and the `num_ended` requests that ended last. Raises the server's error
        if the server refuses the call, and UnavailableError if it does not answer."""
        with self.unless_closed():
            return await self._client.requests(_ANSWER_S, num_ended=num_ended, metadata=metadata)

    @contextmanager
    def unless_closed(self) -> Iterator[None]:
        """Raise UnavailableError instead of RequestCancelledError in the `with` block if the call was cancelled because
        this client was closed."""
        try:
            yield
        except RequestCancelledError as error:
            if not self._is_closed:
                raise
            raise UnavailableError("the HTTP gateway is ending: try again, on a new connection") from error

    async def is_serving(self) -> bool:
        """Return True if the server reports that it serves. Return False if it does not answer."""
        request = health_pb2.HealthCheckRequest(service=_SERVICE)
        try:
            with translate_rpc_errors():
                said = await health_pb2_grpc.HealthStub(self._health).Check(request, timeout=_ANSWER_S)
        except BatonError:
            return False  # a server that does not answer is not ready
        return bool(said.status == health_pb2.HealthCheckResponse.SERVING)

    @asynccontextmanager
    async def answers(self, asked: Asked, request_id: str, metadata: Mapping[str, str]) -> AsyncIterator["Answers"]:
        """Send one request to the server for each prompt in `asked`, and yield their streams. `metadata` identifies the
        caller. Requests that still run at the end of the `with` block are cancelled."""
        async with AsyncExitStack() as stack:
            stack.enter_context(self.unless_closed())
            streams = []
            for number, (prompt, options) in enumerate(zip(asked.prompts, asked.options, strict=True)):
                stream = self._client.generate(
                    token_ids=prompt.token_ids,
                    request_id=request_id if len(asked.prompts) == 1 else _numbered(request_id, number),
                    model=asked.model,
                    priority=asked.priority,
                    cache_salt=asked.cache_salt,
                    deadline_s=self._deadline_s,
                    metadata=metadata,
                    **options,
                )
                streams.append(await stack.enter_async_context(stream))
            yield Answers(streams, self)


class Answers:
    """Token streams of all prompts of one HTTP request."""

    def __init__(self, streams: Sequence[AsyncStream], upstream: Upstream) -> None:
        self._streams, self._upstream = streams, upstream

    @property
    def usages(self) -> list[Usage]:
        """Usage of each prompt whose stream has ended."""
        return [each.usage for each in self._streams if each.usage is not None]

    @property
    def outputs(self) -> list[Completion]:
        """Output of each prompt so far."""
        return [each.output for each in self._streams]

    async def collect(self) -> list[Completion]:
        """Wait until all streams have ended, and return the output of each prompt. Raises the first error of a
        stream."""
        return await asyncio.gather(*(each.collect() for each in self._streams))

    async def events(self) -> AsyncGenerator[tuple[int, TokenEvent], None]:
        """Yield the events of all streams in the order of arrival. Each event comes as a pair (index of the prompt,
        event). Raises the first error of a stream."""
        with self._upstream.unless_closed():
            if len(self._streams) == 1:
                async for event in self._streams[0]:
                    yield 0, event
                return
            async with aclosing(self._mixed()) as mixed:
                async for item in mixed:
                    yield item

    async def _mixed(self) -> AsyncGenerator[tuple[int, TokenEvent], None]:
        failures: list[Exception] = []
        events = asyncio.Queue[tuple[int, TokenEvent] | None](MAX_PENDING_EVENTS)

        async def pass_on(number: int, stream: AsyncStream) -> None:
            try:
                async for event in stream:
                    await events.put((number, event))
            except Exception as error:  # noqa: BLE001 - raised below, once the other streams have ended
                failures.append(error)
            await events.put(None)

        tasks = [asyncio.create_task(pass_on(number, stream)) for number, stream in enumerate(self._streams)]
        try:
            for _ in tasks:
                while (item := await events.get()) is not None:
                    yield item
            if failures:
                raise failures[0]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _numbered(request_id: str, number: int) -> str:
    """Return the id of one prompt's request. An id of the greatest length loses its last characters to the number."""
    suffix = f"-{number}"
    return request_id[: MAX_REQUEST_ID_CHARS - len(suffix)] + suffix
