"""The HTTP application: routes of the OpenAI API, and routes for operators (health, metrics). Runs on the asyncio loop.

The response of a stream begins when its first token is ready. A request that is refused therefore gets the HTTP status
of its error. If a client disconnects, its request is cancelled, even before the first token.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException

from baton import __version__
from baton.errors import BatonError, InvalidArgumentError
from baton.process.clock import SystemClock
from baton.text.bounded_reading import BoundedReading
from baton.types import TokenEvent
from gateway.answers import Chats, Completions, Head, Object, Writer, line
from gateway.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from gateway.chat_answers import ParsedChats
from gateway.console.routes import Console
from gateway.door.access import Access
from gateway.door.held_bodies import HeldBodies
from gateway.door.hosts import CrossOrigin, HostCheck
from gateway.door.json_bodies import BodyRoute
from gateway.door.middleware import RequestCounts
from gateway.door.rules import DEFAULT_RULES, HttpRules
from gateway.errors import NO_FIELDS, FieldNames, error_body, error_headers, status_of
from gateway.fields.names import chat_names, completion_names, tokenize_names
from gateway.openapi import ERRORS, STREAMED, describe
from gateway.reading import Asked, Reader
from gateway.responses.routes import Responses
from gateway.responses.store import DEFAULT_LIMITS, ResponseStore, StoreLimits
from gateway.streaming import (
    FAULT,
    DeferredResponse,
    EventStream,
    caller_of,
    error_of,
    read_body,
    request_id_of,
    unless_gone,
)
from gateway.upstream import Answers, Upstream

_DONE = b"data: [DONE]\n\n"


class Gateway:
    """HTTP application that answers requests by calls to one upstream server."""

    def __init__(
        self,
        upstream: Upstream,
        reader: Reader,
        *,
        rules: HttpRules = DEFAULT_RULES,
        limits: StoreLimits = DEFAULT_LIMITS,
        has_console: bool = True,
    ) -> None:
        """Make a gateway. `upstream` is the server that the gateway calls; the caller owns it. `rules` has the
        permitted hosts, origins and connections, the timeouts, and the trusted headers. `limits` bounds the responses
        that are stored. `has_console` is true if the web console is also served."""
        self.upstream = upstream
        self.rules = rules
        self._reader = reader
        clock = SystemClock()
        self._console = Console(upstream, reader, clock) if has_console else None
        self._responses = Responses(upstream, reader, ResponseStore(limits, clock))
        self._registry = CollectorRegistry()
        self._started_s = int(time.time())

    def app(self, *, is_loopback: bool) -> FastAPI:
        """Return the application with all its routes. `is_loopback` is true if only processes on this machine can
        connect to it."""
        app = FastAPI(title="Baton", version=__version__, docs_url=None, redoc_url=None, responses=ERRORS)
        app.router.route_class = BodyRoute
        access = Access(self.upstream)
        app.state.admit = access.admit
        app.state.bodies = HeldBodies()
        app.state.reading = BoundedReading()
        app.state.trusts_tenant = self.rules.trust_tenant
        if self.rules.allow_origins:
            app.add_middleware(
                CrossOrigin,
                allow_origins=self.rules.allow_origins,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=("x-request-id", "retry-after"),
            )
        app.add_middleware(HostCheck, rules=self.rules, access=access, is_loopback=is_loopback)
        app.add_middleware(RequestCounts, registry=self._registry)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.post("/v1/chat/completions", response_model=None, responses=STREAMED)(self.chat)
        app.post("/v1/completions", response_model=None, responses=STREAMED)(self.completion)
        app.include_router(self._responses.router())
        app.post("/tokenize")(self.tokenize)
        app.post("/detokenize")(self.detokenize)
        app.get("/health", response_class=Response)(self.health)
        app.get("/ready", response_class=Response)(self.ready)
        if self._console is not None:
            app.include_router(self._console.router())
        app.get("/metrics", include_in_schema=False)(self.metrics)
        for path, route in (("/health", self.health), ("/ready", self.ready), ("/metrics", self.metrics)):
            app.head(path, include_in_schema=False)(route)  # used by monitors and load generators
        app.exception_handler(BatonError)(self._refused)
        app.exception_handler(RequestValidationError)(self._malformed)
        app.exception_handler(HTTPException)(self._not_there)
        app.exception_handler(Exception)(self._failed)
        describe(app)
        return app

    async def models(self, request: Request) -> Object:
        """List the models that can be used. There is exactly one."""
        return {"object": "list", "data": [await self._model(request)]}

    async def model(self, name: str, request: Request) -> Object:
        """Return the served model if its name is `name`. Otherwise the request is refused with status 404."""
        self._reader.check_model(name)
        return await self._model(request)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Answer a chat. The answer is sent as a whole or as a stream."""
        request.state.fields = chat_names(body)
        return await self._answer(request, partial(self._reader.chat, body), _chat_writer, "chatcmpl-")

    async def completion(self, body: CompletionBody, request: Request) -> Response:
        """Complete one prompt or several prompts. The answer is sent as a whole or as a stream."""
        request.state.fields = completion_names(body)
        read = partial(self._reader.completion, body)
        return await self._answer(request, read, lambda head, asked: Completions(head), "cmpl-")

    async def tokenize(self, body: TokenizeBody, request: Request) -> Object:
        """Return the token ids of a text or a chat. They are the same as those of a request with this text or chat."""
        request.state.fields = tokenize_names(body)
        tokens = await read_body(request, partial(self._reader.tokenize, body))
        return {"count": len(tokens), "max_model_len": self._reader.model.max_tokens, "tokens": tokens}

    async def detokenize(self, body: DetokenizeBody, request: Request) -> Object:
        """Return the text of token ids. The text includes special tokens."""
        request.state.fields = FieldNames(("model", "tokens"))
        self._reader.check_model(body.model)
        most = self._reader.model.vocab_size
        if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < most:
            raise InvalidArgumentError(f"tokens holds no token id of the model: use 0 to {most - 1}")
        decode = partial(self._reader.tokenizer.decode, with_special=True)
        return {"prompt": await read_body(request, partial(decode, body.tokens))}

    async def health(self) -> Response:
        """Return status 200, which shows that this process runs."""
        return Response()

    async def ready(self) -> Response:
        """Return status 200 if the server can serve requests, otherwise 503."""
        return Response(status_code=200 if await self.upstream.is_serving() else 503)

    async def metrics(self) -> Response:
        """Return the metrics of this process in Prometheus' format. The orchestrator serves the metrics of the
        cluster."""
        return PlainTextResponse(generate_latest(self._registry), media_type="text/plain; version=0.0.4")

    async def _model(self, request: Request) -> Object:
        served = await self.upstream.model(caller_of(request))
        return {
            "id": served.name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "baton",
            "max_model_len": served.max_tokens,
        }

    async def _answer(
        self, request: Request, read: Callable[[], Asked], writes: Callable[[Head, Asked], Writer], prefix: str
    ) -> Response:
        asked = await read_body(request, read)
        return DeferredResponse(partial(self._answered, request, asked, writes, prefix))

    async def _answered(
        self, request: Request, asked: Asked, writes: Callable[[Head, Asked], Writer], prefix: str
    ) -> Response:
        id_ = request_id_of(request, prefix)
        head = Head(
            id_,
            int(time.time()),
            asked.model,
            asked.num_choices,
            self._reader.tokenizer,
            asked.prompts,
            has_logprobs=asked.logprobs is not None,
        )
        writer = writes(head, asked)
        async with AsyncExitStack() as stack:
            answers = await stack.enter_async_context(self.upstream.answers(asked, id_, caller_of(request)))
            headers = {"x-request-id": id_}
            if not asked.is_streamed:
                return JSONResponse(await unless_gone(request, _whole(writer, answers)), headers=headers)
            events = answers.events()
            stack.push_async_callback(events.aclose)
            first = await unless_gone(request, anext(events))
            chunks = _chunks(writer, asked, answers, first, events)
            return EventStream(chunks, stack.pop_all(), headers)  # the response now owns the streams

    async def _refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, BatonError), error
        body = error_body(error, getattr(request.state, "fields", NO_FIELDS))
        return JSONResponse(body, status_of(error), headers=error_headers(error))

    async def _failed(self, request: Request, error: Exception) -> Response:
        """Answer a request that failed because of a defect in this process. `Drain` logs the defect."""
        return JSONResponse(error_body(BatonError(FAULT)), 500)

    async def _malformed(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError), error
        first = error.errors()[0]
        where = [str(each) for each in first["loc"]]
        fields = where[1:] if first["type"] != "json_invalid" else []
        found = InvalidArgumentError(f"{'.'.join(fields) or where[0]}: {first['msg']}")
        return JSONResponse(error_body(found, FieldNames(fields[:1])), 400)

    async def _not_there(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), error
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        text = f"{request.method} {request.url.path}: {error.detail}"
        body = {"error": {"message": text, "type": kind, "param": None, "code": None}}
        return JSONResponse(body, error.status_code, headers=error.headers)


def _chat_writer(head: Head, asked: Asked) -> Writer:
    return Chats(head) if asked.output.is_plain else ParsedChats(head, asked.output)


async def _whole(writer: Writer, answers: Answers) -> Object:
    """Wait for the whole answer and return it. Raises the first error of its streams."""
    if not isinstance(writer, ParsedChats):
        return writer.whole(await answers.collect())
    async for prompt, event in answers.events():
        writer.take(prompt, event)
    return writer.gathered(answers.usages)


async def _chunks(
    writer: Writer,
    asked: Asked,
    answers: Answers,
    first: tuple[int, TokenEvent],
    events: AsyncIterator[tuple[int, TokenEvent]],
) -> AsyncIterator[bytes]:
    """Yield the lines of a stream until its end, or until the error that ended it."""
    try:
        if written := writer.lines(*first):
            yield written
        async for prompt, event in events:
            if written := writer.lines(prompt, event):
                yield written
    except Exception as error:  # noqa: BLE001 - the status is sent: the error is the last thing that the client sees
        yield line(error_body(error_of(error)))
        return
    if asked.includes_usage:
        yield line(writer.usage_chunk(answers.usages))
    yield _DONE
