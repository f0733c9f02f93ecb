"""Interface through which a load sends requests to a server. It does not depend on the server's protocol."""

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
    """True: each conversation is sent as chat messages. False: its messages are joined and sent as one text."""
    temperature: float = 0.0
    ignores_eos: bool = True
    """True: requests have the option to ignore end-of-sequence tokens, so each answer has `max_tokens` tokens. False:
    the model may end an answer earlier."""
    timeout_s: float = 600.0
    """Seconds after which a request counts as failed."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields that are put into the body of each HTTP request."""


@dataclass(frozen=True)
class About:
    """Model and limits that a server reports."""

    model: str
    context_tokens: int | None
    """Maximum number of tokens that the model accepts, prompt and output together. None if the server does not report
    it."""


class Server(Protocol):
    """Interface of a server that receives the load. Used on one event loop."""

    about: About

    async def ask(self, messages: list[Message], max_tokens: int, log: MessageLog) -> TokenCounts | None:
        """Send one request, record each message of its answer in `log`, and return when the answer has ended. Return
        the token counts that the server reports, or None if it does not report them.

        Raises RequestFailedError if the answer is incomplete.
        """


def as_text(messages: list[Message]) -> str:
    """Return the messages of a conversation joined into one text. When the conversation continues, its new text begins
    with the old text."""
    return SEPARATOR.join(content for _, content in messages)
