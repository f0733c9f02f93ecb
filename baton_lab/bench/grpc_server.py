"""Sends requests to a Baton server over gRPC, through `baton.AsyncClient`. Runs on the event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from baton.calls.resume import Reconnect
from baton.calls.streams import AsyncStream
from baton.client import AsyncClient
from baton.errors import BatonError, DeadlineExceededError, UnavailableError
from baton_lab.bench.records import MessageLog, RequestFailedError, TokenCounts
from baton_lab.bench.server import About, Message, Style, as_text

_ANSWER_S = 30.0


class GrpcServer:
    """Baton server over gRPC. Create with `connected`. Implements `baton_lab.bench.server.Server`."""

    def __init__(self, client: AsyncClient, about: About, style: Style) -> None:
        self.about = about
        self._client = client
        self._style = style

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, target: str, api_key: str | None, style: Style) -> AsyncIterator["GrpcServer"]:
        """Connect to the server, read which model it serves, and yield the server. The client does not reconnect, so
        that the benchmark sees failures. Raises UnavailableError if the server does not answer."""
        async with AsyncClient(target, api_key=api_key, reconnect=Reconnect(num_connects=1, num_resumes=0)) as client:
            try:
                model = await client.model(_ANSWER_S)
            except (UnavailableError, DeadlineExceededError) as error:
                raise UnavailableError(f"no server answers at {target}: {error}; check --address") from error
            yield cls(client, About(model.name, model.max_tokens), style)

    async def ask(self, messages: list[Message], max_tokens: int, log: MessageLog) -> TokenCounts | None:
        """Send one request, and read its answer until it ends. The arguments and the result are those of `Server.ask`.

        A step with accepted drafts sends one event per token. These events are recorded as one message with the arrival
        time of the last event. The `drafts` field of the last event gives the number of events to combine.
        """
        try:
            async with asyncio.timeout(self._style.timeout_s), self._stream(messages, max_tokens) as stream:
                async for event in stream:
                    if event.token is None:
                        log.add(event.text)
                    else:
                        log.message(event.text)
                    if event.drafts is not None:
                        log.merge(event.drafts.num_tokens)
        except TimeoutError as error:
            raise RequestFailedError("timeout", f"no end within {self._style.timeout_s:g} s") from error
        except BatonError as error:
            raise RequestFailedError(type(error).__name__.removesuffix("Error"), str(error)) from error
        if not log.message_s:
            raise RequestFailedError("empty", "the answer had no tokens")
        if (usage := stream.usage) is None:
            return None
        return TokenCounts(usage.num_prompt_tokens, usage.num_output_tokens, usage.num_cached_tokens)

    def _stream(self, messages: list[Message], max_tokens: int) -> AsyncStream:
        chat = [{"role": role, "content": content} for role, content in messages] if self._style.is_chat else None
        return self._client.generate(
            None if self._style.is_chat else as_text(messages),
            messages=chat,
            max_tokens=max_tokens,
            temperature=self._style.temperature,
            ignore_eos=self._style.ignores_eos,
        )
