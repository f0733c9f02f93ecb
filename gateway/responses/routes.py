"""HTTP routes of OpenAI's Responses API. Runs on the asyncio loop."""

import asyncio
import hashlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from pydantic_core import to_json

from baton.errors import InvalidArgumentError
from baton.limits import MAX_ITEMS
from baton.results.completion import Usage
from baton.types import TokenEvent
from gateway.answers import Object, line
from gateway.door.held_bodies import HeldBodies
from gateway.door.json_bodies import BodyRoute
from gateway.errors import FieldNames, UnknownResponseError
from gateway.openapi import STREAMED
from gateway.reading import Asked, Reader
from gateway.responses.bodies import Item, ResponsesBody
from gateway.responses.events import ResponseEvents
from gateway.responses.items import Page, named
from gateway.responses.objects import ResponseHead
from gateway.responses.reading import chat_of, items_of, response_names
from gateway.responses.store import Kept, ResponseStore, written
from gateway.streaming import DeferredResponse, EventStream, caller_of, error_of, read_body, request_id_of, unless_gone
from gateway.upstream import Answers, Upstream

Keep = Callable[[Object], Awaitable[bytes]]
"""Function that stores a response, and returns it as JSON."""


class Responses:
    """Handlers of the routes of the Responses API. They call one upstream server, and store the responses."""

    def __init__(self, upstream: Upstream, reader: Reader, store: ResponseStore) -> None:
        self._upstream = upstream
        self._reader = reader
        self._store = store
        self._running = HeldBodies()

    def router(self) -> APIRouter:
        """Return the routes of the Responses API."""
        router = APIRouter(route_class=BodyRoute)
        router.post("/v1/responses", response_model=None, responses=STREAMED)(self.create)
        known = [Depends(_check_caller)]
        router.get("/v1/responses/{response_id}", response_model=Object, dependencies=known)(self.find)
        router.get("/v1/responses/{response_id}/input_items", dependencies=known)(self.find_input)
        router.delete("/v1/responses/{response_id}", dependencies=known)(self.delete)
        return router

    async def create(self, body: ResponsesBody, request: Request) -> Response:
        """Create a response to the next input of a conversation. The response is sent as a whole or as a stream of
        events."""
        request.state.fields = response_names(body)
        before = self._before(body, request)
        read = partial(self._read, body, before)
        asked, conversation, head = await read_body(request, read, 0 if before is None else before.num_bytes)
        keep = partial(self._keep, _owner(request), conversation)
        num_bytes = head.num_bytes + len(conversation or b"")
        return DeferredResponse(partial(self._answered, request, asked, head, keep, num_bytes))

    async def _answered(
        self, request: Request, asked: Asked, head: ResponseHead, keep: Keep, num_bytes: int
    ) -> Response:
        """Answer a request. `num_bytes` is the number of bytes that `head` and `keep` hold until the answer ends."""
        token_text = self._reader.tokenizer.token_text
        events = ResponseEvents(head, asked.output, token_text, has_logprobs=asked.logprobs is not None)
        request_id = request_id_of(request, "resp_")
        headers = {"x-request-id": request_id}
        async with AsyncExitStack() as stack:
            stack.enter_context(self._running.held(request, num_bytes))
            answers = await stack.enter_async_context(self._upstream.answers(asked, request_id, caller_of(request)))
            tokens = answers.events()
            stack.push_async_callback(tokens.aclose)
            if not asked.is_streamed:
                response = await unless_gone(request, _whole(events, answers, tokens))
                return _json(await keep(response), headers)
            _, first = await unless_gone(request, anext(tokens))
            return EventStream(_lines(events, answers, first, tokens, keep), stack.pop_all(), headers)

    async def find(self, response_id: str, request: Request) -> Response:
        """Return a stored response. Unknown ids get status 404."""
        return _json(self._kept(response_id, request).response)

    async def find_input(
        self,
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Object:
        """List the input items of a stored response. They include the earlier conversation."""
        request.state.fields = FieldNames(("after",))
        return Page(limit, order, after).of(await asyncio.to_thread(self._kept(response_id, request).read_input))

    async def delete(self, response_id: str, request: Request) -> Object:
        """Delete a stored response. Unknown ids get status 404."""
        if not self._store.delete(_owner(request), response_id):
            raise _unknown(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    def _kept(self, response_id: str, request: Request) -> Kept:
        kept = self._store.get(_owner(request), response_id)
        if kept is None:
            raise _unknown(response_id)
        return kept

    def _before(self, body: ResponsesBody, request: Request) -> Kept | None:
        """Return the kept response that the body continues from, if it names one."""
        if body.previous_response_id is None:
            return None
        kept = self._store.get(_owner(request), body.previous_response_id)
        if kept is None:
            raise InvalidArgumentError(
                f"previous_response_id = {body.previous_response_id!r:.80} is not kept here, or not any longer: send "
                "the conversation as input"
            )
        return kept

    def _read(self, body: ResponsesBody, before: Kept | None) -> tuple[Asked, bytes | None, ResponseHead]:
        """Return the content of the body, the conversation to be kept as JSON (None if it is not kept), and the head of
        the response. Blocks for long ones."""
        earlier: tuple[Item, ...] = () if before is None else before.read_items()
        items = (*earlier, *named(items_of(body), {item.id for item in earlier}))
        if len(items) > MAX_ITEMS:
            raise InvalidArgumentError(
                f"input: the conversation has {len(items)} items, those of earlier responses included: use at most "
                f"{MAX_ITEMS}; send a shorter one without previous_response_id"
            )
        asked = self._reader.chat(chat_of(body, items))
        head = ResponseHead.of(f"resp_{uuid.uuid4().hex}", int(time.time()), asked.model, body)
        return asked, None if body.store is False else written(items), head

    async def _keep(self, owner: str, conversation: bytes | None, response: Object) -> bytes:
        """Keep a response unless its conversation is None; return it as JSON."""
        content = await asyncio.to_thread(to_json, response)
        if conversation is not None:
            self._store.put(owner, response["id"], content, conversation)
        return content


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
    keep: Keep,
) -> AsyncIterator[bytes]:
    """Yield the lines of a stream until its end, or until the error that ended it. A complete response is stored before
    its last line is sent, so that the client can continue from it at once."""
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
            await keep(each["response"])
        yield line(each, each["type"])


async def _check_caller(request: Request) -> None:
    """Raise the server's error if it refuses the caller, and an error if the server does not answer."""
    await request.app.state.admit(caller_of(request, traces=False), must_answer=True)


def _json(content: bytes, headers: Mapping[str, str] | None = None) -> Response:
    return Response(content, headers=headers, media_type="application/json")


def _usage(answers: Answers) -> Usage | None:
    return answers.usages[0] if answers.usages else None


def _owner(request: Request) -> str:
    """Return an identity of the caller, made from its key and tenant. The key itself is not kept."""
    named = json.dumps(sorted(caller_of(request, traces=False).items()))
    return hashlib.sha256(named.encode()).hexdigest()


def _unknown(id_: str) -> UnknownResponseError:
    return UnknownResponseError(f"response {id_!r:.80} is not stored here, or has expired: send the request again")
