"""Answers of a server to concurrent requests, as the server's clients see them: times of messages, and latencies.
Performs no I/O."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from benchmarks.support.open_loop import percentile


@dataclass(frozen=True)
class Ask:
    """One request of a load: its prompt, the length of its answer, and the time at which it is sent."""

    prompt: tuple[int, ...]
    max_tokens: int
    """Exact number of output tokens that the server must return."""
    at_s: float = 0.0
    """Time at which the request is sent, in seconds from the start of the load."""


@dataclass(frozen=True)
class Answer:
    """Times of one request in nanoseconds since the Unix epoch: when it was sent, and when each message with tokens
    arrived. A message contains the tokens of one step. With speculation, a step may yield several tokens."""

    asked_ns: int
    message_ns: tuple[int, ...]
    num_tokens: int

    @property
    def ttft_s(self) -> float:
        """Time to first token of this request, in seconds."""
        return (self.message_ns[0] - self.asked_ns) / 1e9

    @property
    def tpot_ms(self) -> float:
        """Mean time per output token, in milliseconds: the time from the first to the last message, divided by the
        number of output tokens minus 1."""
        return (self.message_ns[-1] - self.message_ns[0]) / (self.num_tokens - 1) / 1e6

    @property
    def gaps_ms(self) -> list[float]:
        """Times between consecutive messages of this request, in milliseconds."""
        return [(after - before) / 1e6 for before, after in pairwise(self.message_ns)]


@dataclass(frozen=True)
class Answered:
    """Answers of a server to one load, in the order of the load's requests."""

    answers: Sequence[Answer]

    @property
    def seconds(self) -> float:
        """Seconds from the time at which the first request was sent until the last token arrived."""
        first_ns = min(each.asked_ns for each in self.answers)
        return (max(each.message_ns[-1] for each in self.answers) - first_ns) / 1e9

    @property
    def tokens_s(self) -> float:
        """Throughput: output tokens of all requests per second, from the first request to the last token."""
        return sum(each.num_tokens for each in self.answers) / self.seconds

    @property
    def ttft_s(self) -> float:
        """Median time to first token of the requests, in seconds."""
        return statistics.median(each.ttft_s for each in self.answers)

    @property
    def last_ttft_s(self) -> float:
        """Time to first token of the request that was sent last, in seconds."""
        return max(self.answers, key=lambda each: each.asked_ns).ttft_s

    @property
    def tpot_ms(self) -> float:
        """Median of the requests' mean times per output token (`Answer.tpot_ms`), in milliseconds."""
        return statistics.median(each.tpot_ms for each in self.answers)

    @property
    def gap_ms(self) -> float:
        """Median of the times in `gaps_ms`, in milliseconds."""
        return statistics.median(self.gaps_ms)

    @property
    def p99_ms(self) -> float:
        """99th percentile of the times in `gaps_ms`, in milliseconds."""
        return percentile(self.gaps_ms, 99)

    @property
    def gaps_ms(self) -> list[float]:
        """Times between consecutive messages of the same request, in milliseconds. One list has the times of all
        requests."""
        return [gap for each in self.answers for gap in each.gaps_ms]


class FrontDoor(Protocol):
    """Interface of a running server that benchmarks call in the same way as its clients do."""

    async def answer(self, asks: Sequence[Ask]) -> Answered:
        """Send each request at its own time, and return the answers when all have ended. Raises RuntimeError if an
        answer does not match its request."""
        ...

    def pids(self) -> set[int]:
        """Return the ids of the server's processes."""
        ...
