"""HTTP routes of the console: its files, the cluster's state, and the playground's streams. Runs on the asyncio loop.

The files can be loaded without an API key. The state and the streams require a key if the server requires one. The page
sends the key that its user enters, and the server checks it.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException

from baton.process.clock import Clock
from baton.types import TokenEvent
from gateway.answers import Object, line
from gateway.bodies import ChatBody, CompletionBody
from gateway.console.feed import Feed
from gateway.console.pages import load_pages
from gateway.console.views import begun, check_single, ended, snapshot, token
from gateway.door.json_bodies import BodyRoute
from gateway.errors import error_body
from gateway.fields.names import chat_names, completion_names
from gateway.reading import Asked, Reader
from gateway.streaming import DeferredResponse, EventStream, caller_of, error_of, read_body, request_id_of, unless_gone
from gateway.upstream import Answers, Upstream

NUM_ENDED = 48
"""Maximum number of ended requests that the console shows."""
_UNCACHED = {"cache-control": "no-store"}


class Console:
    """Handlers of the console's HTTP routes, for one upstream server."""

    def __init__(self, upstream: Upstream, reader: Reader, clock: Clock) -> None:
        self._upstream = upstream
        self._reader = reader
        self._pages = load_pages()
        self._feed = Feed(self._ask, clock)

    def router(self) -> APIRouter:
        """Return the routes of the console. They are not part of the documented API."""
        router = APIRouter(include_in_schema=False, route_class=BodyRoute)
        router.get("/")(self.root)
        router.get("/console")(self.console)
        router.get("/console/")(self.index)
        router.get("/console/static/{name}")(self.static)
        router.get("/console/api/state")(self.state)
        router.post("/console/api/chat")(self.chat)
        router.post("/console/api/completion")(self.completion)
        return router

    async def root(self, request: Request) -> Response:
        """Redirect browsers to the console. Other clients get status 404."""
        if "text/html" not in request.headers.get("accept", ""):
            raise HTTPException(404)
        return RedirectResponse("console/")

    async def console(self) -> Response:
        """Redirect to the console's page. The redirect and the page's links are relative, so that a proxy can serve the
        console below any path."""
        return RedirectResponse("console/")

    async def index(self, request: Request) -> Response:
        """Return the console's page."""
        return self._pages["index.html"].answer(request)

    async def static(self, name: str, request: Request) -> Response:
        """Return one of the files that the console's page loads. Unknown names get status 404."""
        if name not in self._pages:
            raise HTTPException(404)
        return self._pages[name].answer(request)

    async def state(self, request: Request) -> Response:
        """Return the state of the cluster for the console. The state is at most one second old."""
        return JSONResponse(await self._feed.latest(caller_of(request, traces=False)), headers=_UNCACHED)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Answer a chat. The response is a stream of tokens, with information on how each token was made."""
        request.state.fields = chat_names(body)
        return await self._stream(request, partial(self._reader.chat, body))

    async def completion(self, body: CompletionBody, request: Request) -> Response:
        """Complete a prompt. The response is a stream of tokens, with information on how each token was made."""
        request.state.fields = completion_names(body)
        return await self._stream(request, partial(self._reader.completion, body))

    async def _ask(self, caller: Mapping[str, str]) -> Object:
        """Get the cluster's state, then the requests. The state takes longer, because the server polls all workers for
        it. In this order the requests are the more recent part."""
        state = await self._upstream.state(caller)
        requests = await self._upstream.requests(NUM_ENDED, caller)
        reader = self._reader
        return snapshot(state, requests, reader.model, has_chats=reader.tokenizer.has_chat_template)

    async def _stream(self, request: Request, read: Callable[[], Asked]) -> Response:
        asked = await read_body(request, read)
        check_single(asked)
        return DeferredResponse(partial(self._answered, request, asked))

    async def _answered(self, request: Request, asked: Asked) -> Response:
        id_ = request_id_of(request, "console-")
        async with AsyncExitStack() as stack:
            answers = await stack.enter_async_context(self._upstream.answers(asked, id_, caller_of(request)))
            events = answers.events()
            stack.push_async_callback(events.aclose)
            _, first = await unless_gone(request, anext(events))
            return EventStream(self._lines(answers, first, events), stack.pop_all(), {"x-request-id": id_})

    async def _lines(
        self, answers: Answers, first: TokenEvent, events: AsyncIterator[tuple[int, TokenEvent]]
    ) -> AsyncIterator[bytes]:
        """Yield the lines of a stream until its end, or until the error that ended it."""
        yield line(begun(answers.outputs[0]), "begin")
        try:
            yield line(self._token(first), "token")
            async for _, event in events:
                yield line(self._token(event), "token")
        except Exception as error:  # noqa: BLE001 - the status is sent: the error is the last thing that is shown
            yield line(error_body(error_of(error)), "error")
            return
        yield line(ended(answers.outputs[0]), "end")

    def _token(self, event: TokenEvent) -> Object:
        own_text = "" if event.token is None else self._reader.tokenizer.token_text(event.token.token_id)
        return token(event, own_text)
