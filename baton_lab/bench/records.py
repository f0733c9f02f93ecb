"""Record of one request of a load: instants by this process's clock, tokens, and why it failed. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from baton.errors import BatonError


class RequestFailedError(BatonError):
    """A request got no whole answer. `kind` is a word by which failures are counted."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of one request, as the server counted them."""

    num_prompt: int
    num_output: int
    num_cached: int | None = None
    """Prompt tokens whose KV was cached; None where the server does not say."""


class MessageLog:
    """Takes the messages of one answer as they come. Owned by the request's task."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.now_s = now_s
        """Returns the seconds since the load's start."""
        self._texts: list[str] = []
        self.message_s: list[float] = []
        """Instants at which messages with text or tokens came."""

    def message(self, text: str) -> None:
        """Record that a message with this text has just arrived."""
        self.message_s.append(self.now_s())
        self._texts.append(text)

    def add(self, text: str) -> None:
        """Record text that came with the message before, as an answer's last words do."""
        self._texts.append(text)

    def merge(self, num_messages: int) -> None:
        """Count the latest `num_messages` messages, which one step brought, as one that came with the last of them."""
        self.message_s[-num_messages:] = self.message_s[-1:]

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._texts)


@dataclass(frozen=True)
class Record:
    """One request of a load. Instants are seconds from the load's start."""

    conversation: int
    turn: int
    """Place of the request in its conversation, from 0."""
    due_s: float
    """Instant at which the request is due. In an open loop, no answer delays it."""
    sent_s: float
    end_s: float
    """When the answer had ended, or the request had failed."""
    max_tokens: int
    """Requested number of output tokens."""
    message_s: tuple[float, ...] = ()
    """When messages with text came. A message holds the tokens of one step, with speculation perhaps several."""
    counts: TokenCounts | None = None
    """Tokens as the server counted them; None where it did not, or the request failed."""
    failure: str = ""
    """Kind of the failure; empty where the request was answered."""
    explanation: str = field(default="", repr=False)
    """Error message of the failure; empty where the request was answered."""

    @property
    def lateness_s(self) -> float:
        """Seconds by which the generator itself was late."""
        return self.sent_s - self.due_s

    @property
    def is_answered(self) -> bool:
        """Return whether the whole answer arrived."""
        return not self.failure

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer; the number of its messages if the server does not count tokens."""
        return len(self.message_s) if self.counts is None else self.counts.num_output

    @property
    def ttft_s(self) -> float:
        """Seconds from the instant at which the request was due to its first message."""
        return self.message_s[0] - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first message; None for an answer of one token or message."""
        if self.num_output_tokens < 2 or len(self.message_s) < 2:
            return None
        return (self.message_s[-1] - self.message_s[0]) / (self.num_output_tokens - 1)

    @property
    def e2el_s(self) -> float:
        """Seconds from the instant at which the request was due to the answer's end."""
        return self.end_s - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between consecutive messages."""
        return [after - before for before, after in pairwise(self.message_s)]
