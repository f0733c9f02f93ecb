"""Sends requests to an HTTP server with OpenAI's API, as completions or as chats. The server streams its answers as
server-sent events. Runs on the event loop."""

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from baton.errors import ConfigError, UnavailableError
from baton_lab.bench.records import MessageLog, RequestFailedError, TokenCounts
from baton_lab.bench.server import About, Message, Style, as_text

_KEPT_S = 2.0
"""Maximum idle time in seconds of a connection that may be reused. Shorter than the keep-alive timeout of common
servers."""
_CONNECT_S = 30.0
_SHOWN = 200
"""Maximum number of characters of a server's error message that this client quotes."""
_DATA, _DONE = b"data:", b"[DONE]"


class OpenAiServer:
    """Server with OpenAI's HTTP API. Create with `connected`. Implements `baton_lab.bench.server.Server`."""

    def __init__(self, session: aiohttp.ClientSession, base: str, about: About, style: Style) -> None:
        self.about = about
        self._session = session
        self._style = style
        self._url = f"{base}/chat/completions" if style.is_chat else f"{base}/completions"

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(
        cls, url: str, model: str | None, api_key: str | None, style: Style
    ) -> AsyncIterator["OpenAiServer"]:
        """Connect to the server and yield it. Reads the server's list of models; uses `model` if the list contains it,
        or the first listed model if `model` is None.

        Raises UnavailableError if the server does not answer, and ConfigError if it does not serve `model` or does not
        list its models.
        """
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        base = url.rstrip("/") if url.rstrip("/").endswith("/v1") else f"{url.rstrip('/')}/v1"
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_S)
        timeout = aiohttp.ClientTimeout(total=style.timeout_s, connect=_CONNECT_S)
        async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
            yield cls(session, base, await _about(session, base, model), style)

    async def ask(self, messages: list[Message], max_tokens: int, log: MessageLog) -> TokenCounts | None:
        """Send one request, record each message of its answer in `log`, and return when the answer has ended. Return
        the token counts that the server reports, or None if it does not report them."""
        body = self._body(messages, max_tokens)
        try:
            async with self._session.post(self._url, json=body) as answer:
                if answer.status != 200:
                    raise RequestFailedError(f"http_{answer.status}", _complaint(await answer.read()))
                return await _read(answer, log)
        except TimeoutError as error:
            raise RequestFailedError("timeout", f"no end within {self._style.timeout_s:g} s") from error
        except aiohttp.ClientConnectorError as error:
            raise RequestFailedError("connect", str(error)) from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
            raise RequestFailedError("disconnect", f"the server closed the connection: {error}") from error
        except aiohttp.ClientError as error:
            raise RequestFailedError(type(error).__name__, str(error)) from error

    def _body(self, messages: list[Message], max_tokens: int) -> dict[str, Any]:
        said: dict[str, Any] = (
            {"messages": [{"role": role, "content": content} for role, content in messages]}
            if self._style.is_chat
            else {"prompt": as_text(messages)}
        )
        return {
            "model": self.about.model,
            **said,
            "max_tokens": max_tokens,
            "temperature": self._style.temperature,
            **({"ignore_eos": True} if self._style.ignores_eos else {}),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._style.extra,
        }


async def _about(session: aiohttp.ClientSession, base: str, model: str | None) -> About:
    try:
        async with session.get(f"{base}/models") as answer:
            if answer.status in (401, 403):
                raise ConfigError(f"{base} refuses the key ({answer.status}): give one by --api-key-env")
            text = await answer.read()
            if answer.status != 200:
                raise ConfigError(f"{base}/models answers {answer.status} ({_complaint(text)}): check --url")
    except (aiohttp.ClientError, TimeoutError) as error:
        said = str(error) or "no answer in time"
        raise UnavailableError(f"no server answers at {base}: {said}; check --url") from error
    try:
        limits = {str(each["id"]): each.get("max_model_len") for each in json.loads(text)["data"]}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{base}/models is not a list of models: check --url") from error
    name = next(iter(limits), None) if model is None else model
    if name is None:
        raise ConfigError(f"{base}/models lists no model: name one by --model")
    if name not in limits:
        raise ConfigError(f"--model: {name!r} is none of {', '.join(limits)}: name one of these")
    return About(name, limits[name] if isinstance(limits[name], int) else None)


async def _read(answer: aiohttp.ClientResponse, log: MessageLog) -> TokenCounts | None:
    """Read server-sent events to the end. Return the usage that they report; None if they report none."""
    counts, is_over = None, False
    async for data in _data_of(answer):
        if data == _DONE:
            is_over = True
            continue
        event = _parsed(data)
        text, has_finished = _text_of(event)
        if text:
            log.message(text)
        is_over = is_over or has_finished
        counts = _counts_of(event) or counts
    if not is_over:
        raise RequestFailedError("truncated", "the stream ended before the answer did")
    if not log.message_s:
        raise RequestFailedError("empty", "the answer had no text")
    return counts


async def _data_of(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the data of each event, stripped of whitespace."""
    waiting = b""
    async for chunk in answer.content.iter_any():
        *lines, waiting = (waiting + chunk).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                yield line[len(_DATA) :].strip()
    if waiting.startswith(_DATA):
        yield waiting[len(_DATA) :].strip()


def _parsed(data: bytes) -> Mapping[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise RequestFailedError("bad_answer", f"an event is not valid JSON: {data[:_SHOWN]!r}") from error
    if not isinstance(event, dict):
        raise RequestFailedError("bad_answer", f"an event is not an object: {data[:_SHOWN]!r}")
    if "error" in event:
        raise RequestFailedError("stream_error", _complaint(data))
    return event


def _text_of(event: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the text of an event (content or reasoning), and whether the event ends the answer."""
    if not event.get("choices"):
        return "", False
    choice = event["choices"][0]
    delta = choice.get("delta")
    if delta is None:
        text = choice.get("text") or ""
    else:
        text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
    return text, choice.get("finish_reason") is not None


def _counts_of(event: Mapping[str, Any]) -> TokenCounts | None:
    usage = event.get("usage")
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return TokenCounts(usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens"))


def _complaint(body: bytes) -> str:
    """Return a server's error message on one line: the `message` of OpenAI's error format, or the beginning of the
    body."""
    try:
        error = json.loads(body)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        text = body.decode(errors="replace")
    return " ".join(text.split())[:_SHOWN]
