"""Measurements of concurrent streams: when each request was sent, and when its tokens were generated.

Throughput is measured while all streams generate. This period begins when every stream has generated its first token,
and ends when one of the streams has generated its last token. In this period, the batch is full.
"""

import statistics
from dataclasses import dataclass
from typing import Protocol

from benchmarks.support.harness import random_prompt


@dataclass(frozen=True)
class Load:
    """Requests that are sent at the same time."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each stream's prompt."""
    max_tokens: int
    """Exact number of output tokens of each stream."""


@dataclass(frozen=True)
class StreamTimes:
    """Times of one stream, in nanoseconds since the Unix epoch."""

    asked_ns: int
    first_ns: int
    """Time at which the caller received the first token."""
    token_ns: tuple[int, ...]
    """Time at which each token was generated, according to the clock of the generating engine."""


@dataclass(frozen=True)
class Measured:
    """Times of all streams of one load, measured on one system."""

    streams: tuple[StreamTimes, ...]

    @property
    def ttft_s(self) -> float:
        """Median time to first token of the streams, in seconds."""
        return statistics.median((each.first_ns - each.asked_ns) / 1e9 for each in self.streams)

    @property
    def window_ns(self) -> tuple[int, int]:
        """Period in which all streams generate: [start, end) in nanoseconds since the Unix epoch."""
        return max(each.token_ns[0] for each in self.streams), min(each.token_ns[-1] for each in self.streams)

    @property
    def step_ms(self) -> float:
        """Median, over the streams, of the mean milliseconds per output token after the first."""
        return statistics.median(
            (each.token_ns[-1] - each.token_ns[0]) / (len(each.token_ns) - 1) / 1e6 for each in self.streams
        )

    @property
    def tokens_s(self) -> float:
        """Tokens per second of all streams together, in the period in which all streams generate. Raises ValueError if
        the streams never generate at the same time."""
        start, end = self.window_ns
        num_tokens = sum(start < ns <= end for each in self.streams for ns in each.token_ns)
        if end <= start or num_tokens < 2 * len(self.streams):
            raise ValueError("streams did not run at the same time: ask for more output tokens (--max-tokens)")
        return num_tokens / (end - start) * 1e9


class Side(Protocol):
    """System that a benchmark compares with others and that can stream: a served cluster, or a bare engine."""

    async def measure(self, load: Load) -> Measured:
        """Send all requests at once, and return the measurements when all streams have ended."""
        ...


def make_load(num_streams: int, num_tokens: int, max_tokens: int, seed: int) -> Load:
    """Return a load of `num_streams` random prompts of `num_tokens` tokens, each with `max_tokens` output tokens. The
    same seed gives the same prompts."""
    first = seed * num_streams
    return Load(tuple(random_prompt(num_tokens, first + each) for each in range(num_streams)), max_tokens)
