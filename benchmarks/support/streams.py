"""Measurements of concurrent streams of one side: when each was sent, and when its tokens were made.

Throughput is measured over the period in which all streams generate: from the last stream's first token to the first
stream's last token. In this period the batch is full, on every side.
"""

import statistics
from dataclasses import dataclass
from typing import Protocol

from benchmarks.support.harness import random_prompt


@dataclass(frozen=True)
class Load:
    """Requests that are sent to a side at the same time."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each stream's prompt."""
    max_tokens: int
    """Exact number of output tokens of each stream."""


@dataclass(frozen=True)
class StreamTimes:
    """Times of one stream, in unix nanoseconds."""

    asked_ns: int
    first_ns: int
    """Time at which the first token reached the side's caller."""
    token_ns: tuple[int, ...]
    """Time at which each token was made, by the clock of the engine that made it."""


@dataclass(frozen=True)
class Measured:
    """Measurements of one load on one side."""

    streams: tuple[StreamTimes, ...]

    @property
    def ttft_s(self) -> float:
        """Median seconds to the first token over the streams."""
        return statistics.median((each.first_ns - each.asked_ns) / 1e9 for each in self.streams)

    @property
    def window_ns(self) -> tuple[int, int]:
        """Period [start, end) in unix nanoseconds in which all streams generate."""
        return max(each.token_ns[0] for each in self.streams), min(each.token_ns[-1] for each in self.streams)

    @property
    def step_ms(self) -> float:
        """Median milliseconds per output token after the first, over the streams."""
        return statistics.median(
            (each.token_ns[-1] - each.token_ns[0]) / (len(each.token_ns) - 1) / 1e6 for each in self.streams
        )

    @property
    def tokens_s(self) -> float:
        """Tokens per second of all streams in the period in which all generate. Raises ValueError if there is no such
        period."""
        start, end = self.window_ns
        num_tokens = sum(start < ns <= end for each in self.streams for ns in each.token_ns)
        if end <= start or num_tokens < 2 * len(self.streams):
            raise ValueError("streams did not run at the same time: ask for more output tokens (--max-tokens)")
        return num_tokens / (end - start) * 1e9


class Side(Protocol):
    """A side of a comparison that can stream: a served cluster, or a bare engine."""

    async def measure(self, load: Load) -> Measured:
        """Send all requests at once, and return the measurements when all streams have ended."""
        ...


def make_load(num_streams: int, num_tokens: int, max_tokens: int, seed: int) -> Load:
    """Return a load of random prompts, determined by the seed."""
    first = seed * num_streams
    return Load(tuple(random_prompt(num_tokens, first + each) for each in range(num_streams)), max_tokens)
