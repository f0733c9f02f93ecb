"""Answers of a server to concurrent requests, as its clients see them: times of messages, and latencies. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from benchmarks.support.open_loop import percentile


@dataclass(frozen=True)
class Ask:
    """One request of a load."""

    prompt: tuple[int, ...]
    max_tokens: int
    """Exact number of output tokens of the answer."""
    at_s: float = 0.0
    """Time at which it is sent, in seconds from the start of the load."""


@dataclass(frozen=True)
class Answer:
    """Times of one request in unix nanoseconds: when it was sent, and when each message with tokens arrived. A message
    holds the tokens of one step: with speculation, possibly several."""

    asked_ns: int
    message_ns: tuple[int, ...]
    num_tokens: int

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return (self.message_ns[0] - self.asked_ns) / 1e9

    @property
    def tpot_ms(self) -> float:
        """Milliseconds per output token after the first message."""
        return (self.message_ns[-1] - self.message_ns[0]) / (self.num_tokens - 1) / 1e6

    @property
    def gaps_ms(self) -> list[float]:
        """Milliseconds between consecutive messages."""
        return [(after - before) / 1e6 for before, after in pairwise(self.message_ns)]


@dataclass(frozen=True)
class Answered:
    """Answers to one load, in the order of its requests."""

    answers: Sequence[Answer]

    @property
    def seconds(self) -> float:
        """Seconds from the first request to the last token."""
        first_ns = min(each.asked_ns for each in self.answers)
        return (max(each.message_ns[-1] for each in self.answers) - first_ns) / 1e9

    @property
    def tokens_s(self) -> float:
        """Output tokens of all requests per second, from the first request to the last token."""
        return sum(each.num_tokens for each in self.answers) / self.seconds

    @property
    def ttft_s(self) -> float:
        """Median seconds to the first token over the requests."""
        return statistics.median(each.ttft_s for each in self.answers)

    @property
    def last_ttft_s(self) -> float:
        """Seconds to the first token of the request sent last."""
        return max(self.answers, key=lambda each: each.asked_ns).ttft_s

    @property
    def tpot_ms(self) -> float:
        """Median milliseconds per output token after the first message, over the requests."""
        return statistics.median(each.tpot_ms for each in self.answers)

    @property
    def gap_ms(self) -> float:
        """Median milliseconds between consecutive messages of a request."""
        return statistics.median(self.gaps_ms)

    @property
    def p99_ms(self) -> float:
        """99th percentile of the milliseconds between consecutive messages of a request."""
        return percentile(self.gaps_ms, 99)

    @property
    def gaps_ms(self) -> list[float]:
        """Milliseconds between consecutive messages of a request, for all requests."""
        return [gap for each in self.answers for gap in each.gaps_ms]


class FrontDoor(Protocol):
    """Running server, called through the interface of its clients."""

    async def answer(self, asks: Sequence[Ask]) -> Answered:
        """Send all requests, each at its time, and return the answers when all have ended. Raises RuntimeError for an
        answer that does not match its request."""
        ...

    def pids(self) -> set[int]:
        """Return the ids of the server's processes."""
        ...
