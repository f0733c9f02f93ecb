"""Record of one request of a load: times, token counts, and the failure, if any. Does no I/O."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from baton.errors import BatonError


class RequestFailedError(BatonError):
    """Error raised when a request did not get a complete answer. `kind` is the name under which failures of this sort
    are counted."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class TokenCounts:
    """Token counts of one request, as the server reports them."""

    num_prompt: int
    num_output: int
    num_cached: int | None = None
    """Number of prompt tokens whose KV was found in the server's cache; None if the server does not report it."""


class MessageLog:
    """Log of the messages of one answer. Owned by the request's task."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.now_s = now_s
        """Function that returns the seconds since the start of the load."""
        self._texts: list[str] = []
        self.message_s: list[float] = []
        """Arrival times of messages with text or tokens, in seconds since the start of the load."""

    def message(self, text: str) -> None:
        """Record a message with the given text. Its arrival time is now."""
        self.message_s.append(self.now_s())
        self._texts.append(text)

    def add(self, text: str) -> None:
        """Append text to the answer without recording a new message. Used for text that arrives without a token, after
        the message of the last token, such as the last words of an answer."""
        self._texts.append(text)

    def merge(self, num_messages: int) -> None:
        """Replace the latest `num_messages` messages by one message. The replaced messages came from one step. The new
        message has the arrival time of the latest of them."""
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
    """Scheduled time of the request, in seconds since the start of the load. For the second and later turns of a
    conversation, it is the end of the previous answer plus the think time."""
    sent_s: float
    end_s: float
    """Time at which the answer ended or the request failed, in seconds since the start of the load."""
    max_tokens: int
    """Maximum number of output tokens that the request asks for."""
    message_s: tuple[float, ...] = ()
    """Arrival times of messages with text, in seconds since the start of the load. One message holds the tokens of one
    step, which can be several with speculative decoding."""
    counts: TokenCounts | None = None
    """Token counts that the server reported. None if it did not report them, or if the request failed."""
    failure: str = ""
    """Kind of failure; empty if the request was answered."""
    explanation: str = field(default="", repr=False)
    """Error message of the failure; empty if the request was answered."""

    @property
    def lateness_s(self) -> float:
        """Seconds by which the load generator sent the request later than scheduled."""
        return self.sent_s - self.due_s

    @property
    def is_answered(self) -> bool:
        """True if the whole answer arrived."""
        return not self.failure

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens as the server reports it. If the server does not report it, the number of
        messages."""
        return len(self.message_s) if self.counts is None else self.counts.num_output

    @property
    def ttft_s(self) -> float:
        """Time to first token: seconds from the scheduled time of the request to its first message."""
        return self.message_s[0] - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token: mean seconds per token after the first message. None if the answer has fewer than two
        tokens or fewer than two messages."""
        if self.num_output_tokens < 2 or len(self.message_s) < 2:
            return None
        return (self.message_s[-1] - self.message_s[0]) / (self.num_output_tokens - 1)

    @property
    def e2el_s(self) -> float:
        """End-to-end latency: seconds from the scheduled time of the request to the end of the answer."""
        return self.end_s - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        """Return the seconds between consecutive messages."""
        return [after - before for before, after in pairwise(self.message_s)]
