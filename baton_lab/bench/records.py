"""Record of one request of a load: times, token counts, and the failure, if any. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from baton.errors import BatonError


class RequestFailedError(BatonError):
    """A request did not get a complete answer. `kind`: name under which the failure is counted."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class TokenCounts:
    """Token counts of one request, as reported by the server."""

    num_prompt: int
    num_output: int
    num_cached: int | None = None
    """Number of prompt tokens whose KV was cached; None if the server does not report it."""


class MessageLog:
    """Log of the messages of one answer. Owned by the request's task."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.now_s = now_s
        """Function that returns the seconds since the start of the load."""
        self._texts: list[str] = []
        self.message_s: list[float] = []
        """Arrival times of messages with text or tokens."""

    def message(self, text: str) -> None:
        """Record a message with this text that has just arrived."""
        self.message_s.append(self.now_s())
        self._texts.append(text)

    def add(self, text: str) -> None:
        """Add text that arrived with the previous message, such as the last words of an answer."""
        self._texts.append(text)

    def merge(self, num_messages: int) -> None:
        """Replace the latest `num_messages` messages, which came from one step, by one with the arrival time of the
        last."""
        self.message_s[-num_messages:] = self.message_s[-1:]

    @property
    def text(self) -> str:
        """All text received so far."""
        return "".join(self._texts)


@dataclass(frozen=True)
class Record:
    """One request of a load. Times are in seconds since the start of the load."""

    conversation: int
    turn: int
    """Index of the turn in its conversation, from 0."""
    due_s: float
    """Scheduled time of the request. For later turns: the end of the previous answer plus the think time."""
    sent_s: float
    end_s: float
    """Time at which the answer ended or the request failed."""
    max_tokens: int
    """Number of output tokens that the request asks for."""
    message_s: tuple[float, ...] = ()
    """Arrival times of messages with text. A message holds the tokens of one step: with speculation, possibly
    several."""
    counts: TokenCounts | None = None
    """Token counts reported by the server; None if it reported none, or if the request failed."""
    failure: str = ""
    """Kind of the failure; empty if the request was answered."""
    explanation: str = field(default="", repr=False)
    """Error message of the failure; empty if the request was answered."""

    @property
    def lateness_s(self) -> float:
        """Seconds from the scheduled time to the time at which the generator sent the request."""
        return self.sent_s - self.due_s

    @property
    def is_answered(self) -> bool:
        """Return whether the whole answer arrived."""
        return not self.failure

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens; the number of messages if the server does not count tokens."""
        return len(self.message_s) if self.counts is None else self.counts.num_output

    @property
    def ttft_s(self) -> float:
        """Seconds from the scheduled time to the first message."""
        return self.message_s[0] - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first message; None if the answer has fewer than two tokens or
        messages."""
        if self.num_output_tokens < 2 or len(self.message_s) < 2:
            return None
        return (self.message_s[-1] - self.message_s[0]) / (self.num_output_tokens - 1)

    @property
    def e2el_s(self) -> float:
        """Seconds from the scheduled time to the end of the answer."""
        return self.end_s - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between consecutive messages."""
        return [after - before for before, after in pairwise(self.message_s)]
