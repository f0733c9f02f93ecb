"""Routes of the Responses API. On the loop."""

import hashlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from baton.errors import InvalidArgumentError
from baton.results.completion import Usage
from baton.types import TokenEvent
from gateway.answers import Object, line
from gateway.door.json_bodies import BodyRoute
from gateway.errors import FieldNames, UnknownResponseError
from gateway.openapi import STREAMED
from gateway.reading import Asked, Reader
from gateway.responses.bodies import Item, ResponsesBody
from gateway.responses.events import ResponseEvents
from gateway.responses.items import Page, named
from gateway.responses.objects import ResponseHead
from gateway.responses.reading import chat_of, items_of, response_names
from gateway.responses.store import Kept, ResponseStore
from gateway.streaming import EventStream, caller_of, error_of, read_body, request_id_of, unless_gone
from gateway.upstream import Answers, Upstream


class Responses:
    """Answers requests for responses by one upstream server, and keeps what it answers."""

    def __init__(self, upstream: Upstream, reader: Reader, store: ResponseStore) -> None:
        self._upstream = upstream
        self._reader = reader
        self._store = store

    def router(self) -> APIRouter:
        """Return the routes of this API."""
        router = APIRouter(route_class=BodyRoute)
        router.post("/v1/responses", response_model=None, responses=STREAMED)(self.create)
        router.get("/v1/responses/{response_id}")(self.find)
        router.get("/v1/responses/{response_id}/input_items")(self.find_input)
        router.delete("/v1/responses/{response_id}")(self.delete)
        return router

    async def create(self, body: ResponsesBody, request: Request) -> Response:
        """Answer the next turn of a conversation, whole or as a stream of events."""
        request.state.fields = response_names(body)
        before = self._before(body, request)
        items = (*before, *named(items_of(body), {item.id for item in before}))
        asked = await read_body(request, partial(self._read, body, items))
        head = ResponseHead(f"resp_{uuid.uuid4().hex}", int(time.time()), asked.model, body)
        token_text = self._reader.tokenizer.token_text
        events = ResponseEvents(head, asked.output, token_text, has_logprobs=asked.logprobs is not None)
        request_id = request_id_of(request, "resp_")
        headers = {"x-request-id": request_id}
        keep = partial(self._keep, body, _owner(request), items)
        async with AsyncExitStack() as stack:
            answers = await stack.enter_async_context(self._upstream.answers(asked, request_id, caller_of(request)))
            tokens = answers.events()
            stack.push_async_callback(tokens.aclose)
            if not asked.is_streamed:
                response = await unless_gone(request, _whole(events, answers, tokens))
                keep(response)
                return JSONResponse(response, headers=headers)
            _, first = await unless_gone(request, anext(tokens))
            return EventStream(_lines(events, answers, first, tokens, keep), stack.pop_all(), headers)

    async def find(self, response_id: str, request: Request) -> Object:
        """Return a response that is kept."""
        return self._kept(response_id, request).response

    async def find_input(
        self,
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Object:
        """List the items that a kept response was made from, those of the conversation before it included."""
        request.state.fields = FieldNames(("after",))
        return Page(limit, order, after).of(self._kept(response_id, request).input)

    async def delete(self, response_id: str, request: Request) -> Object:
        """Forget a response that is kept."""
        if not self._store.delete(_owner(request), response_id):
            raise _unknown(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    def _kept(self, response_id: str, request: Request) -> Kept:
        kept = self._store.get(_owner(request), response_id)
        if kept is None:
            raise _unknown(response_id)
        return kept

    def _before(self, body: ResponsesBody, request: Request) -> tuple[Item, ...]:
        """Return the conversation that the body goes on with."""
        if body.previous_response_id is None:
            return ()
        kept = self._store.get(_owner(request), body.previous_response_id)
        if kept is None:
            raise InvalidArgumentError(
                f"previous_response_id = {body.previous_response_id!r:.80} is not kept here, or not any longer: send "
                "the conversation as input"
            )
        return kept.items

    def _read(self, body: ResponsesBody, items: tuple[Item, ...]) -> Asked:
        return self._reader.chat(chat_of(body, items))

    def _keep(self, body: ResponsesBody, owner: str, items: tuple[Item, ...], response: Object) -> None:
        if body.store is not False:
            output = tuple(Item.model_validate(item) for item in response["output"])
            self._store.put(owner, response, (*items, *output))


async def _whole(events: ResponseEvents, answers: Answers, tokens: AsyncIterator[tuple[int, TokenEvent]]) -> Object:
    """Return the response, once it is complete. Raises the error of its stream."""
    async for _, event in tokens:
        for _ in events.take(event):
            pass
    *_, last = events.end(_usage(answers))
    response: Object = last["response"]
    return response


async def _lines(
    events: ResponseEvents,
    answers: Answers,
    first: TokenEvent,
    tokens: AsyncIterator[tuple[int, TokenEvent]],
    keep: Callable[[Object], None],
) -> AsyncIterator[bytes]:
    """Yield a stream's lines, to its end or to the error that ended it. A complete response is kept before its last
    line is sent, so that the client may go on from it at once."""
    try:
        for each in (*events.begin(), *events.take(first)):
            yield line(each, each["type"])
        async for _, event in tokens:
            for each in events.take(event):
                yield line(each, each["type"])
    except Exception as error:  # noqa: BLE001 - the status is sent: the error is the last thing that the client sees
        for each in events.fail(str(error_of(error))):
            yield line(each, each["type"])
        return
    for each in events.end(_usage(answers)):
        if "response" in each:
            keep(each["response"])
        yield line(each, each["type"])


def _usage(answers: Answers) -> Usage | None:
    return answers.usages[0] if answers.usages else None


def _owner(request: Request) -> str:
    """Return what stands for the caller, by its key and tenant, of which nothing else is kept."""
    named = json.dumps(sorted(caller_of(request, traces=False).items()))
    return hashlib.sha256(named.encode()).hexdigest()


def _unknown(id_: str) -> UnknownResponseError:
    return UnknownResponseError(f"response {id_!r:.80} is not kept here, or not any longer: ask anew")
