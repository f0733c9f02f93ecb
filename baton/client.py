"""Synchronous and asyncio clients of a Baton server (`baton serve`). A client sends requests and returns streams of
tokens.

Example:

    from baton import Client

    with Client("127.0.0.1:50051") as client:
        for event in client.generate("The capital of France is", max_tokens=64):
            print(event.text, end="", flush=True)
"""

import asyncio
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Self, TypeVar, Unpack

import grpc

from baton.calls.cluster_state import ClusterState, cluster_state_from_proto
from baton.calls.requests import PromptInput, call_metadata, check_deadline, make_request
from baton.calls.resume import Reconnect, ServerState, StreamState
from baton.calls.streams import AsyncCall, AsyncStream, BaseStream, Call, Stream, client_closed
from baton.channel_options import DEFAULT_TARGET, Keepalive, channel_options
from baton.errors import RequestCancelledError
from baton.process.clock import Clock, SystemClock
from baton.process.endless import is_task_cancelled
from baton.process.tracing import trace_metadata
from baton.proto_types import model_from_proto, requests_from_proto
from baton.results.completion import ModelInfo
from baton.results.request_list import RequestList
from baton.rpc_status import translate_rpc_errors
from baton.sampling_params import SamplingOptions, SamplingParams
from baton.v1 import orchestrator_pb2, orchestrator_pb2_grpc

Metadata = tuple[tuple[str, str], ...]
StreamT = TypeVar("StreamT", bound=BaseStream[Any])


class _BaseClient(ABC, Generic[StreamT]):
    """Base class of both clients. It opens the connection and creates the streams of requests."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        api_key: str | None = None,
        tenant: str | None = None,
        reconnect: Reconnect | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Create a client of the server at `target` (host:port). Nothing is sent yet.

        `api_key` identifies the caller to servers that require API keys. The key is sent unencrypted, like all other
        data. `tenant` names the tenant of the calls, for servers that trust this name (`trust_tenant_metadata`). Raises
        InvalidArgumentError for a key or tenant that is not printable ASCII.
        """
        self._caller = call_metadata(api_key, tenant)
        self._server = ServerState(target)
        self._reconnect = reconnect or Reconnect()
        self._clock = clock or SystemClock()
        self._streams: weakref.WeakSet[StreamT] = weakref.WeakSet()
        self._connect()

    def generate(
        self,
        prompt: str | bytes | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        token_ids: Sequence[int] | None = None,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        model: str = "",
        echo: bool = False,
        deadline_s: float | None = None,
        priority: str = "standard",
        metadata: Mapping[str, str] | None = None,
        exact: bool = False,
        cache_salt: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> StreamT:
        """Send a request and return its stream. The call does not block and must not be awaited.

        Give exactly one input: `prompt` (text), `messages` (a chat: mappings with `role` and `content`) or `token_ids`.
        Give sampling parameters either as keywords (the fields of SamplingParams) or as `params`.

        - Seed: the seed in `params` is used even if it is 0. Without a seed the server draws one, and
          `stream.output.seed` returns it.
        - `request_id`: id of the request in logs. None: an id is generated.
        - `model`: must be empty or the name of the served model.
        - `echo`: the text of each choice begins with the prompt.
        - `deadline_s`: the server ends the request this many seconds from now. It rejects the request immediately if
          it predicts that the first token would arrive after the deadline.
        - `priority`: interactive, standard or batch. Among the waiting requests of one tenant, the most urgent
          priority is served first.
        - `metadata`: sent as gRPC metadata, together with the caller's current OpenTelemetry span, if there is one.
        - `exact`: only groups that attend to all tokens may serve the request. The request is rejected if there is no
          such group. See `stream.output.exact`.
        - `cache_salt`: requests share cached KV only if their `cache_salt` is equal.

        Raises InvalidArgumentError for a request that cannot be sent, and RequestCancelledError after `close`. The
        stream raises the server's errors.
        """
        source = PromptInput(prompt, messages, token_ids)
        fields = orchestrator_pb2.GenerateRequest(
            request_id=request_id or "", model=model, echo=echo, exact=exact, cache_salt=cache_salt
        )
        request = make_request(source, params, sampling, priority, fields)
        check_deadline(deadline_s)
        state = StreamState(request, self._server, self._reconnect, self._clock, deadline_s=deadline_s)
        return self._start(state, (*self._caller, *trace_metadata(), *(metadata or {}).items()))

    def _sent(self, metadata: Mapping[str, str] | None) -> Metadata:
        return *self._caller, *(metadata or {}).items()

    @abstractmethod
    def _connect(self) -> None: ...

    @abstractmethod
    def _start(self, state: StreamState, metadata: Metadata) -> StreamT: ...


class Client(_BaseClient[Stream]):
    """Synchronous client with a connection to a server. Any number of threads may share it, and any number of streams
    may run at the same time.

    The client connects at the first call and reconnects automatically. Use it as a context manager, or call `close`.
    """

    def _connect(self) -> None:
        self._channel = grpc.insecure_channel(self._server.target, options=channel_options(Keepalive()))
        self._stub = orchestrator_pb2_grpc.OrchestratorStub(self._channel)
        self._lock = threading.Lock()  # guards against `close` while a stream is being made
        self._is_closed = False

    def model(self, timeout_s: float = 10.0, *, metadata: Mapping[str, str] | None = None) -> ModelInfo:
        """Return a description of the served model. `metadata` is sent as gRPC metadata. Blocks. Raises
        UnavailableError or DeadlineExceededError if the server does not answer within `timeout_s`."""
        request, sent = orchestrator_pb2.GetModelRequest(), self._sent(metadata)
        with self._errors():
            return model_from_proto(self._stub.GetModel(request, timeout=timeout_s, metadata=sent))

    def cluster_state(self, timeout_s: float = 10.0, *, metadata: Mapping[str, str] | None = None) -> ClusterState:
        """Return the state of the cluster. `metadata` is sent as gRPC metadata. Blocks. Raises UnavailableError or
        DeadlineExceededError if the server does not answer within `timeout_s`."""
        request, sent = orchestrator_pb2.GetClusterStateRequest(), self._sent(metadata)
        with self._errors():
            return cluster_state_from_proto(self._stub.GetClusterState(request, timeout=timeout_s, metadata=sent))

    def requests(
        self, timeout_s: float = 10.0, *, num_ended: int = 64, metadata: Mapping[str, str] | None = None
    ) -> RequestList:
        """Return the waiting and running requests, and the `num_ended` requests that ended most recently. Prompts and
        outputs are not included. `metadata` is sent as gRPC metadata. Blocks. Raises UnavailableError or
        DeadlineExceededError if the server does not answer within `timeout_s`."""
        request, sent = orchestrator_pb2.GetRequestsRequest(num_ended=num_ended), self._sent(metadata)
        with self._errors():
            return requests_from_proto(self._stub.GetRequests(request, timeout=timeout_s, metadata=sent))

    def close(self) -> None:
        """Cancel all streams, including those that wait to reconnect, and close the connection. Idempotent."""
        with self._lock:
            self._is_closed = True
            for stream in list(self._streams):
                client_closed(stream)
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with translate_rpc_errors():
                yield
        except ValueError as error:  # raised by grpc for a call on a closed channel
            if not self._is_closed:
                raise
            raise _closed_error(self._server) from error

    def _start(self, state: StreamState, metadata: Metadata) -> Stream:
        def open_call(state: StreamState) -> Call:
            return self._stub.Generate(state.next_request(), timeout=state.timeout_s(), metadata=metadata)

        with self._lock, self._errors():
            stream = Stream(state, open_call)
            self._streams.add(stream)
        return stream


class AsyncClient(_BaseClient[AsyncStream]):
    """Asyncio client with a connection to a server. Use it only on the event loop on which it was created. Apart from
    that, it behaves like Client."""

    def _connect(self) -> None:
        self._channel = grpc.aio.insecure_channel(self._server.target, options=channel_options(Keepalive()))
        self._stub = orchestrator_pb2_grpc.OrchestratorStub(self._channel)

    async def model(self, timeout_s: float = 10.0, *, metadata: Mapping[str, str] | None = None) -> ModelInfo:
        """Return a description of the served model. `metadata` is sent as gRPC metadata. Raises UnavailableError or
        DeadlineExceededError if the server does not answer within `timeout_s`."""
        request, sent = orchestrator_pb2.GetModelRequest(), self._sent(metadata)
        with self._errors():
            return model_from_proto(await self._stub.GetModel(request, timeout=timeout_s, metadata=sent))

    async def cluster_state(
        self, timeout_s: float = 10.0, *, metadata: Mapping[str, str] | None = None
    ) -> ClusterState:
        """Return the state of the cluster. `metadata` is sent as gRPC metadata. Raises UnavailableError or
        DeadlineExceededError if the server does not answer within `timeout_s`."""
        request, sent = orchestrator_pb2.GetClusterStateRequest(), self._sent(metadata)
        with self._errors():
            return cluster_state_from_proto(await self._stub.GetClusterState(request, timeout=timeout_s, metadata=sent))

    async def requests(
        self, timeout_s: float = 10.0, *, num_ended: int = 64, metadata: Mapping[str, str] | None = None
    ) -> RequestList:
        """Return the waiting and running requests, and the `num_ended` requests that ended most recently. Prompts and
        outputs are not included. `metadata` is sent as gRPC metadata. Raises UnavailableError or DeadlineExceededError
        if the server does not answer within `timeout_s`."""
        request, sent = orchestrator_pb2.GetRequestsRequest(num_ended=num_ended), self._sent(metadata)
        with self._errors():
            return requests_from_proto(await self._stub.GetRequests(request, timeout=timeout_s, metadata=sent))

    async def close(self) -> None:
        """Cancel all streams, including those that wait to reconnect, and close the connection. Idempotent."""
        for stream in list(self._streams):
            client_closed(stream)
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with translate_rpc_errors():
                yield
        except asyncio.CancelledError as error:  # raised by grpc for a call whose channel is closed
            if is_task_cancelled():
                raise
            raise _closed_error(self._server) from error
        except grpc.aio.UsageError as error:  # raised by grpc for a call on a closed channel
            raise _closed_error(self._server) from error

    def _start(self, state: StreamState, metadata: Metadata) -> AsyncStream:
        def open_call(state: StreamState) -> AsyncCall:
            return self._stub.Generate(state.next_request(), timeout=state.timeout_s(), metadata=metadata)

        with self._errors():
            stream = AsyncStream(state, open_call)
        self._streams.add(stream)
        return stream


def _closed_error(server: ServerState) -> RequestCancelledError:
    return RequestCancelledError(f"the client of {server.target} is closed: make another")
