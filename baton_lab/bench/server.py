"""Port through which a load sends requests to a server, independent of the server's protocol."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton_lab.bench.records import MessageLog, TokenCounts

Message = tuple[str, str]
"""Role and content of one message of a conversation."""
SEPARATOR = "\n\n"
"""Separator between the messages of a conversation that is sent as one text."""


@dataclass(frozen=True)
class Style:
    """Parameters that all requests of a load share."""

    is_chat: bool = False
    """True: conversations are sent as chats. False: each is sent as one text."""
    temperature: float = 0.0
    ignores_eos: bool = True
    """True: answers run to `max_tokens`, even if the model ends them earlier."""
    timeout_s: float = 600.0
    """Seconds after which a request counts as failed."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields in the bodies of HTTP requests."""


@dataclass(frozen=True)
class About:
    """Model and limits that a server reports."""

    model: str
    context_tokens: int | None
    """Maximum number of prompt and output tokens together that the model accepts; None if the server does not report
    it."""


class Server(Protocol):
    """Server under load. Used on one event loop."""

    about: About

    async def ask(self, messages: list[Message], max_tokens: int, log: MessageLog) -> TokenCounts | None:
        """Send one request, record each message of its answer in `log`, and return when the answer has ended. Return
        the token counts that the server reports; None if it reports none.

        Raises RequestFailedError if the answer is not complete.
        """


def as_text(messages: list[Message]) -> str:
    """Return a conversation as one text. The text of a conversation is a prefix of the text of its continuation."""
    return SEPARATOR.join(content for _, content in messages)
