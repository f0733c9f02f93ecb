"""Gateway: serves clients like an orchestrator does, and forwards their requests to an orchestrator in another process.

Runs in its own process, which `deploy.front_doors.gateway` starts. `orchestrator.api.request_reader` reads requests.
The gateway forwards token ids, the caller's metadata, the time left before the deadline, and cancellations. Replies,
including errors, are forwarded byte for byte. The gateway stores nothing of a stream, so a client can resume a stream
at any other gateway. When the orchestrator moves to another address, `GrpcGateway.move` is called. Runs on the
process's asyncio loop. Long prompts are tokenized in threads.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

from baton.errors import BatonError, ConfigError, UnavailableError
from baton.process.backoff import Backoff
from baton.process.clock import Clock
from baton.process.endless import is_task_cancelled, repeat
from baton.proto_types import model_from_proto
from baton.text.tokenizer import Tokenizer
from baton.transport.channel import bind, make_server
from baton.transport.status_interceptor import translate_rpc_errors
from baton.v1 import orchestrator_pb2 as pb
from baton.v1.orchestrator_pb2_grpc import OrchestratorStub
from orchestrator.api.checks import RequestValidator
from orchestrator.api.delivery import deliver
from orchestrator.api.request_reader import RequestReader, deadline_s

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Metadata = tuple[tuple[str, str | bytes], ...]
_GenerateCall = grpc.aio.UnaryStreamCall[pb.GenerateRequest, bytes]

SERVICE = pb.DESCRIPTOR.services_by_name["Orchestrator"].full_name
_STATUS_GRACE_S = 1.0
"""Maximum time in seconds that a stopping server waits, after all requests have ended, for the last statuses to be
sent."""
_PASSED_ON = ("GetModel", "GetClusterState", "GetRequests")
"""Methods whose messages are forwarded unchanged."""
_CLOSING = "the gateway is shutting down: try again"
_ANSWER_S = 10.0
"""Timeout in seconds for the call that returns the orchestrator's model."""
_MOST_MS = 2.0**32 - 1
"""Maximum deadline in milliseconds. The message stores it in a field of 32 bits."""
_AGAIN_S = 0.5
"""Number of seconds between two attempts to reach an orchestrator that does not answer."""
_HEALTH_PAUSES = Backoff(_AGAIN_S, 5.0)


class GatewayServicer:
    """Serves baton.v1.Orchestrator by forwarding calls to an orchestrator in another process. Messages that are
    forwarded unchanged are not parsed."""

    def __init__(self, orchestrator: grpc.aio.Channel, reader: RequestReader, model: str, clock: Clock) -> None:
        self._generate: grpc.aio.UnaryStreamMultiCallable[pb.GenerateRequest, bytes]
        self._unary: dict[str, grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]]
        self.use(orchestrator)
        self._reader = reader
        self._model = model
        self._clock = clock
        self._calls: dict[asyncio.Task[Any], grpc.aio.Call] = {}
        """Running calls to the orchestrator. The key is the task that forwards the call's messages."""
        self._closing = False

    def use(self, orchestrator: grpc.aio.Channel) -> None:
        """Send new calls to `orchestrator`. Calls to the previous orchestrator continue until its channel is closed."""
        self._generate = orchestrator.unary_stream(f"/{SERVICE}/Generate", pb.GenerateRequest.SerializeToString)
        self._unary = {name: orchestrator.unary_unary(f"/{SERVICE}/{name}") for name in _PASSED_ON}

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of the service's methods, which must be added to a gRPC server."""
        methods: dict[str, Any] = {  # their types are those of synchronous servers
            "Generate": grpc.unary_stream_rpc_method_handler(self.generate, pb.GenerateRequest.FromString),
        }
        for name in _PASSED_ON:
            methods[name] = grpc.unary_unary_rpc_method_handler(partial(self._pass_on, name))
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Read a request, send it to the orchestrator as token ids, and stream the orchestrator's events."""
        end_s = deadline_s(request, context, self._clock)
        left_s = None if end_s is None else end_s - self._clock.now_s()
        async with aclosing(self._answer(request, context, end_s)) as messages:
            await deliver(context, messages, left_s)

    async def _answer(
        self, request: pb.GenerateRequest, context: Context, end_s: float | None
    ) -> AsyncGenerator[bytes, None]:
        passed, echo = await self._reader.off_the_loop(request, partial(self._read, request))
        if end_s is not None:
            passed.deadline_ms = round(min(max((end_s - self._clock.now_s()) * 1000, 1.0), _MOST_MS))
        if self._closing:
            raise UnavailableError(_CLOSING)
        call = self._generate(passed, metadata=_passed_on(context.invocation_metadata() or ()))
        task = asyncio.current_task()
        assert task is not None, "served in a task"
        self._calls[task] = call
        try:
            async for message in self._messages(call):
                yield _with_echo(message, echo) if echo else message
        finally:
            call.cancel()
            del self._calls[task]

    async def close(self, grace_s: float) -> None:
        """Refuse new requests, and wait at most `grace_s` seconds for running requests. End the remaining ones with
        UNAVAILABLE, so that their clients resume them elsewhere."""
        self._closing = True
        if self._calls:
            await asyncio.wait(self._calls, timeout=grace_s)
        for call in self._calls.values():
            call.cancel()

    async def _messages(self, call: _GenerateCall) -> AsyncIterator[bytes]:
        """Yield all messages that the orchestrator sends; raise the error with which it ended the call."""
        with self._translated():
            while isinstance(message := await call.read(), bytes):
                yield message

    async def _pass_on(self, name: str, request: bytes, context: Context) -> bytes:
        metadata = _passed_on(context.invocation_metadata() or ())
        with self._translated():
            return await self._unary[name](request, timeout=context.time_remaining(), metadata=metadata)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise the BatonError that an error of a call to the orchestrator stands for."""
        try:
            with translate_rpc_errors():
                yield
        except asyncio.CancelledError as error:
            if is_task_cancelled():
                raise  # the client has gone
            why = _CLOSING if self._closing else "the orchestrator gave the call up: try again"
            raise UnavailableError(why) from error  # grpc.aio's report of a call that was cancelled

    def _read(self, request: pb.GenerateRequest) -> tuple[pb.GenerateRequest, str]:
        """Return the request to send to the orchestrator, and the text with which the text of each choice begins."""
        read = self._reader.read(request)
        passed = pb.GenerateRequest()
        passed.CopyFrom(request)
        passed.token_ids.ids[:] = read.prompt_ids  # in place of prompt or chat
        passed.request_id = read.request_id
        passed.model = self._model  # token ids mean nothing to another model
        passed.echo = False  # decoding the ids does not always give the exact text
        return passed, read.echo


class GrpcGateway:
    """gRPC server that forwards requests to an orchestrator. Made with `start`, on the asyncio loop."""

    def __init__(
        self,
        server: grpc.aio.Server,
        servicer: GatewayServicer,
        port: int,
        shown: health.HealthServicer,
        watch: Callable[[grpc.aio.Channel], Coroutine[Any, Any, None]],
    ) -> None:
        """`shown` is the health service of the server. `watch`: function that copies the health of an orchestrator to
        `shown` until it is cancelled."""
        self.port = port
        self._server = server
        self._servicer = servicer
        self._shown = shown
        self._watch = watch
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        orchestrator: grpc.aio.Channel,
        tokenizer: Tokenizer,
        model: pb.Model,
        *,
        clock: Clock,
        host: str,
        port: int = 0,
        caller: Metadata = (),
    ) -> Self:
        """Start a gateway on host:port, and return it. Port 0 selects any free port. The caller remains the owner of
        the channel `orchestrator`, and must close it.

        `model` is the result of `ask_model`. `caller` is the metadata of the gateway's own calls to the orchestrator.
        It is not added to forwarded calls of clients. Raises ConfigError if the gateway cannot listen on the port, or
        if `tokenizer` differs from the orchestrator's tokenizer.
        """
        if model.tokenizer_fingerprint not in ("", tokenizer.fingerprint):
            raise ConfigError(
                f"the orchestrator's model, {model.name}, has another tokenizer or chat template: name the same model"
            )
        server = make_server()
        bound = bind(server, host, port)
        info = model_from_proto(model)
        servicer = GatewayServicer(
            orchestrator, RequestReader(RequestValidator(tokenizer, info, ())), model.name, clock
        )
        server.add_generic_rpc_handlers((servicer.handler(),))
        shown = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(shown, server)
        health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        reflection.enable_server_reflection((SERVICE, health_name, reflection.SERVICE_NAME), server)
        await _show(shown, health_pb2.HealthCheckResponse.NOT_SERVING)  # until the orchestrator answers
        await server.start()
        gateway = cls(server, servicer, bound, shown, partial(_show_health, shown, model, caller))
        await gateway.move(orchestrator)
        return gateway

    async def move(self, orchestrator: grpc.aio.Channel) -> None:
        """Forward new requests to `orchestrator` from now on. Streams of the previous orchestrator continue until the
        caller closes its channel. They then end with UNAVAILABLE, and their clients resume them here."""
        await self._end_watch()
        self._servicer.use(orchestrator)
        self._watching = asyncio.create_task(self._watch(orchestrator))

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new requests and connections, and wait at most `grace_s` seconds for running requests. End the
        remaining ones with UNAVAILABLE.

        Clients of ended streams resume them at another gateway, or at this one after a restart. Idempotent.
        """
        await self._end_watch()
        await self._shown.enter_graceful_shutdown()
        leaving = asyncio.create_task(self._server.stop(grace_s + _STATUS_GRACE_S))  # clients learn to go elsewhere
        await self._servicer.close(grace_s)
        await self._server.stop(_STATUS_GRACE_S)  # no longer waits for clients that only watch the health
        await leaving

    async def _end_watch(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)


async def ask_model(orchestrator: grpc.aio.Channel, timeout_s: float, caller: Metadata = ()) -> pb.Model:
    """Call the orchestrator, and return the model that it serves. The call carries the metadata `caller`.

    Raises UnavailableError or DeadlineExceededError if the orchestrator does not answer, and UnauthenticatedError if it
    requires a key that `caller` does not have.
    """
    with translate_rpc_errors():
        request = pb.GetModelRequest()
        return await OrchestratorStub(orchestrator).GetModel(request, timeout=timeout_s, metadata=caller)


async def _show_health(
    shown: health.HealthServicer, model: pb.Model, caller: Metadata, orchestrator: grpc.aio.Channel
) -> None:
    """Show the orchestrator's health until cancelled; NOT_SERVING while it is away or serves another model."""
    told = ""

    async def look() -> None:
        nonlocal told
        try:
            served = await ask_model(orchestrator, _ANSWER_S, caller)
            if _alike(served) == _alike(model):
                told = ""
                await _follow_health(shown, orchestrator)
                why = "the orchestrator no longer says whether it serves"
            else:
                why = f"the orchestrator serves {served.name}, other than {model.name} before: restart the gateway"
        except BatonError as error:
            why = f"the orchestrator is away: {error}"
        if not told:
            logger.warning("not serving: %s", why)
        told = why
        await _show(shown, health_pb2.HealthCheckResponse.NOT_SERVING)
        await asyncio.sleep(_AGAIN_S)

    await repeat("the watch on the orchestrator's health", look, _HEALTH_PAUSES)


def _alike(model: pb.Model) -> tuple[object, ...]:
    """Return the properties of a model by which requests are read; its weights may change meanwhile."""
    return model.name, model.max_tokens, model.vocab_size, model.tokenizer_fingerprint


async def _follow_health(shown: health.HealthServicer, orchestrator: grpc.aio.Channel) -> None:
    """Show each health status that the orchestrator streams, until it ends the call."""
    watching = health_pb2_grpc.HealthStub(orchestrator).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    try:
        with translate_rpc_errors():
            async for said in watching:
                await _show(shown, said.status)
    finally:
        watching.cancel()


async def _show(shown: health.HealthServicer, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
    for service in ("", SERVICE):
        await shown.set(service, status)


def _passed_on(metadata: Iterable[tuple[str, str | bytes]]) -> Metadata:
    """Return the metadata to pass on: all but the keys about the connection itself."""
    return tuple((key, value) for key, value in metadata if not key.startswith(("grpc-", "user-agent")))


def _with_echo(message: bytes, echo: str) -> bytes:
    """Return the event with the prompt before the text of a choice's first token; other events unchanged."""
    event = pb.GenerateEvent.FromString(message)
    if not event.HasField("token") or event.token.index or not event.token.HasField("token"):
        return message
    event.token.text = echo + event.token.text
    return event.SerializeToString()
