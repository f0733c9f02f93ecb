"""Statistics of a run: rates, percentiles, goodput, failures by kind. Does no I/O."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from baton_lab.bench.loops import Arrivals, Run
from baton_lab.bench.records import Record

LATE_S = 0.01
"""Threshold in seconds for the 99th percentile of the load generator's lateness. `doubts` warns above it."""
BUSY = 0.9
"""Threshold for the mean number of cores that the load generator uses. `doubts` warns above it."""
LATENCIES = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True)
class Percentiles:
    """Mean and percentiles of a list of durations in seconds; NaN if the list is empty."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles":
        """Return the mean and the linearly interpolated percentiles of `values`."""
        if not values:
            return cls(*[math.nan] * 4)
        return cls(float(np.mean(values)), *(float(each) for each in np.percentile(values, (50, 90, 99))))


@dataclass(frozen=True)
class Summary:
    """Statistics of a run. Latencies include answered requests only. Rates are per second of the run's duration."""

    name: str
    offered_rate: float | None
    """Conversations per second that the load specifies; None for a closed loop."""
    num_requests: int
    num_answered: int
    num_unasked: int
    """Number of turns that were not sent because an earlier turn of their conversation failed."""
    num_short: int
    """Number of answers with fewer tokens than requested."""
    num_uncounted: int
    """Number of answers for which the server did not report token counts. For them, the number of messages is used as
    the number of tokens."""
    failures: Mapping[str, int]
    """Number of failed requests by kind."""
    seconds: float
    requests_s: float
    """Number of answered requests per second of the run."""
    prompt_tokens_s: float
    output_tokens_s: float
    mean_prompt_tokens: float
    mean_output_tokens: float
    cached_share: float
    """Fraction of the prompt tokens whose KV was found in the server's cache. Includes only requests for which the
    server reported the number of these tokens; NaN if there are none."""
    latencies: Mapping[str, Percentiles]
    """Latencies in seconds by metric. `ttft`: from the scheduled time of the request to the first message. `tpot`: mean
    time per output token after the first message. `itl`: between two consecutive messages. `e2el`: from the scheduled
    time to the end of the answer."""
    lateness: Percentiles
    """Percentiles of the generator's lateness: seconds from the scheduled time of a request to the time at which it was
    sent."""
    used_cores: float
    """Mean number of cores that the generator used."""
    num_good: int | None
    """Number of requests that met all latency targets; None if there are no targets."""

    @property
    def goodput(self) -> float | None:
        """Return the number of requests per second that met all latency targets; None if there are no targets."""
        return None if self.num_good is None else _ratio(self.num_good, self.seconds)

    @property
    def good_share(self) -> float | None:
        """Return the fraction of requests that met all latency targets; None if there are no targets. Requests that
        failed or were not sent count as not good."""
        return None if self.num_good is None else _ratio(self.num_good, self.num_requests + self.num_unasked)


def summarize(run: Run, targets: Mapping[str, float]) -> Summary:
    """Return the statistics of a run. `targets`: latency targets in seconds by metric, or empty if there are none."""
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
    """Return the latencies in seconds by metric. There is one value per request; for `itl` (inter-token latency), one
    value per gap between messages."""
    return {
        "ttft": [each.ttft_s for each in answered],
        "tpot": [tpot_s for each in answered if (tpot_s := each.tpot_s) is not None],
        "itl": [gap_s for each in answered for gap_s in each.gaps_s],
        "e2el": [each.e2el_s for each in answered],
    }


def is_good(record: Record, targets: Mapping[str, float]) -> bool:
    """Return True if the request was answered and met all latency targets. An answer of one token has no time per
    output token (`tpot`); it counts as meeting any target for this metric."""
    if not record.is_answered:
        return False
    took = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2el_s}
    return all(took[metric] <= seconds for metric, seconds in targets.items())


def doubts(summary: Summary, *, may_end_early: bool) -> list[str]:
    """Return warnings, one text each, if the results may not show how the server performs under the intended load.

    `may_end_early`: True if answers may be shorter than requested; short answers then cause no warning.
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
