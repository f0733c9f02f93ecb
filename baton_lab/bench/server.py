"""Port through which a load sends requests to a server of any protocol."""

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
    """How requests are sent: the same for all of a load."""

    is_chat: bool = False
    """True: conversations are sent as chats. False: each is sent as one text."""
    temperature: float = 0.0
    ignores_eos: bool = True
    """True: answers run to `max_tokens`, even if the model ends them earlier."""
    timeout_s: float = 600.0
    """Seconds after which a request counts as failed."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the bodies of HTTP requests."""


@dataclass(frozen=True)
class About:
    """Model and limits that a server reports."""

    model: str
    context_tokens: int | None
    """Tokens of prompt and answer together that the model takes; None where the server does not say."""


class Server(Protocol):
    """A server under load. Used on one loop."""

    about: About

    async def ask(self, messages: list[Message], max_tokens: int, log: MessageLog) -> TokenCounts | None:
        """Send one request, give each message of its answer to `log`, and return when the answer has ended. Return the
        tokens as the server counted them, None where it did not.

        Raises RequestFailedError when there is no whole answer.
        """


def as_text(messages: list[Message]) -> str:
    """Return a conversation as one text. The text of a longer conversation continues that of its beginning."""
    return SEPARATOR.join(content for _, content in messages)
