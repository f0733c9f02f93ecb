"""Summary of a run: rates, percentiles, goodput, failures by kind. Pure."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from baton_lab.bench.loops import Arrivals, Run
from baton_lab.bench.records import Record

LATE_S = 0.01
"""99th percentile of the generator's own lateness, in seconds, above which its numbers are doubted."""
BUSY = 0.9
"""Part of a core that the generator may use before its numbers are doubted."""
LATENCIES = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True)
class Percentiles:
    """A distribution of seconds; nan where there are no values."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles":
        """Return mean and percentiles of values, percentiles interpolated linearly."""
        if not values:
            return cls(*[math.nan] * 4)
        return cls(float(np.mean(values)), *(float(each) for each in np.percentile(values, (50, 90, 99))))


@dataclass(frozen=True)
class Summary:
    """A run in numbers. Latencies are those of answered requests; rates are over the run's seconds."""

    name: str
    offered_rate: float | None
    """Conversations that began a second, as the load wanted; None for a closed loop."""
    num_requests: int
    num_answered: int
    num_unasked: int
    """Turns that were not sent because an earlier turn of their conversation failed."""
    num_short: int
    """Answers of fewer tokens than requested."""
    num_uncounted: int
    """Answers whose tokens the server did not count, so that messages were counted in their place."""
    failures: Mapping[str, int]
    """Failed requests by kind."""
    seconds: float
    requests_s: float
    """Answered requests a second."""
    prompt_tokens_s: float
    output_tokens_s: float
    mean_prompt_tokens: float
    mean_output_tokens: float
    cached_share: float
    """Part of the prompt tokens whose KV was cached; nan where the server does not say."""
    latencies: Mapping[str, Percentiles]
    """Seconds: ttft from due to the first message, tpot a request's mean per output token after that, itl between
    messages, e2el from due to the end."""
    lateness: Percentiles
    """Seconds by which the generator itself sent requests late."""
    used_cores: float
    """Processor seconds a second that the generator used."""
    num_good: int | None
    """Requests within all targets; None without targets."""

    @property
    def goodput(self) -> float | None:
        """Return the good requests a second; None without targets."""
        return None if self.num_good is None else _ratio(self.num_good, self.seconds)

    @property
    def good_share(self) -> float | None:
        """Return the part of all requests that were good, failed and unasked ones counted as not; None without
        targets."""
        return None if self.num_good is None else _ratio(self.num_good, self.num_requests + self.num_unasked)


def summarize(run: Run, targets: Mapping[str, float]) -> Summary:
    """Return a run in numbers, under targets in seconds by metric."""
    answered = [each for each in run.records if each.is_answered]
    num_prompt = [each.counts.num_prompt for each in answered if each.counts is not None]
    num_output = [each.num_output_tokens for each in answered]
    return Summary(
        name=run.load.name,
        offered_rate=run.load.rate if isinstance(run.load, Arrivals) else None,
        num_requests=len(run.records),
        num_answered=len(answered),
        num_unasked=run.num_unasked,
        num_short=sum(each.counts is not None and each.counts.num_output < each.max_tokens for each in answered),
        num_uncounted=sum(each.counts is None for each in answered),
        failures=dict(Counter(each.failure for each in run.records if each.failure).most_common()),
        seconds=run.seconds,
        requests_s=_ratio(len(answered), run.seconds),
        prompt_tokens_s=_ratio(sum(num_prompt), run.seconds),
        output_tokens_s=_ratio(sum(num_output), run.seconds),
        mean_prompt_tokens=_ratio(sum(num_prompt), len(num_prompt)),
        mean_output_tokens=_ratio(sum(num_output), len(num_output)),
        cached_share=_cached_share(answered),
        latencies={metric: Percentiles.of(values) for metric, values in latencies(answered).items()},
        lateness=Percentiles.of([each.lateness_s for each in run.records]),
        used_cores=_ratio(run.used_s, run.seconds),
        num_good=sum(is_good(each, targets) for each in run.records) if targets else None,
    )


def latencies(answered: Sequence[Record]) -> Mapping[str, list[float]]:
    """Return all values in seconds by metric. Each metric has one value a request; itl has one for each gap."""
    return {
        "ttft": [each.ttft_s for each in answered],
        "tpot": [tpot_s for each in answered if (tpot_s := each.tpot_s) is not None],
        "itl": [gap_s for each in answered for gap_s in each.gaps_s],
        "e2el": [each.e2el_s for each in answered],
    }


def is_good(record: Record, targets: Mapping[str, float]) -> bool:
    """Return whether a request was answered within all targets. An answer of one token has no time per output token,
    and misses no target of it."""
    if not record.is_answered:
        return False
    took = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2el_s}
    return all(took[metric] <= seconds for metric, seconds in targets.items())


def doubts(summary: Summary, *, may_end_early: bool) -> list[str]:
    """Return the reasons, one a line, why a run's numbers may not be the server's at the intended load.

    `may_end_early`: short answers are expected, and are not a reason.
    """
    found = []
    if summary.lateness.p99 > LATE_S:
        late_ms = summary.lateness.p99 * 1e3
        found.append(f"requests were sent {late_ms:.0f} ms late (p99): send fewer, or from a machine with idle cores")
    if summary.used_cores > BUSY:
        found.append(f"this process used {summary.used_cores:.2f} cores: send fewer, or run several generators")
    if summary.num_uncounted:
        found.append(f"the server did not count the tokens of {summary.num_uncounted} answers: messages were counted")
    if summary.num_short and not may_end_early:
        found.append(f"{summary.num_short} answers had fewer tokens than were asked for")
    return found


def _cached_share(answered: Sequence[Record]) -> float:
    known = [each.counts for each in answered if each.counts is not None and each.counts.num_cached is not None]
    return _ratio(sum(each.num_cached or 0 for each in known), sum(each.num_prompt for each in known))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
