"""Results of a simulated trace: latencies, goodput, cost, and the changes that a scaling policy made. Does no I/O."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton_lab.traffic.gaps import GapHistogram
from baton_lab.traffic.traces.trace import Trace

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Targets:
    """Latency targets. A request that meets both counts as good."""

    ttft_s: float = 2.0
    """Maximum time to first token, in seconds."""
    itl_s: float = 0.05
    """Maximum mean time between the output tokens of a request, in seconds."""


@dataclass(frozen=True)
class ScalerEvent:
    """One change of the number of groups by a scaling policy. In advisory mode, the change that the policy would have
    made."""

    time_s: float
    what: str
    """Numbers of prefill and generation groups before and after the change, for example `2:2 -> 2:3`."""
    why: str
    """One line of text with the change, its reason, and the numbers that led to it."""


@dataclass(frozen=True)
class Results:
    """Results of one simulation. Times are arrays with one entry per request; NaN if the request was refused."""

    trace: Trace
    first_s: NDArray[np.float64]
    """Time of each request's first token, in seconds since the start of the trace."""
    end_s: NDArray[np.float64]
    """Time of each request's last token, in seconds since the start of the trace."""
    gaps: GapHistogram
    group_s: float
    """Cost in group-seconds: the seconds from a group's start until it leaves the cluster, summed over all groups."""
    num_events: int
    num_cached_tokens: int
    scaler_events: tuple[ScalerEvent, ...] = ()

    @property
    def ttft_s(self) -> NDArray[np.float64]:
        """Return the time in seconds from the arrival of each request to its first token. NaN for refused requests."""
        return self.first_s - self.trace.arrivals_s

    @property
    def itl_s(self) -> NDArray[np.float64]:
        """Return the mean time in seconds between the output tokens of each request. 0 for answers of one token; NaN
        for refused requests."""
        return (self.end_s - self.first_s) / np.maximum(self.trace.output_tokens - 1, 1)

    @property
    def makespan_s(self) -> float:
        """Return the seconds from the start of the trace to the end of the last request."""
        return float(np.nanmax(self.end_s)) if not np.all(np.isnan(self.end_s)) else 0.0

    def is_good(self, targets: Targets) -> NDArray[np.bool_]:
        """Return an array with one bool per request: True if the request met both targets. False for refused
        requests."""
        return (self.ttft_s <= targets.ttft_s) & (self.itl_s <= targets.itl_s)

    def goodput(self, targets: Targets) -> float:
        """Return the goodput: the number of requests within the targets, per second of the trace's duration."""
        return float(self.is_good(targets).sum()) / max(self.trace.duration_s, 1e-9)

    def summary(self, targets: Targets) -> dict[str, Any]:
        """Return the results as a dictionary of plain values, for tables and JSON."""
        ttft_s = self.ttft_s[~np.isnan(self.ttft_s)]
        good = self.is_good(targets)
        return {
            "trace": self.trace.name,
            "num_requests": len(self.trace),
            "num_refused": int(np.isnan(self.first_s).sum()),
            "ttft_s": {f"p{each}": float(np.percentile(ttft_s, each)) if len(ttft_s) else None for each in PERCENTILES},
            "itl_s": {f"p{each}": self.gaps.percentile(each) if self.gaps.num_gaps else None for each in PERCENTILES},
            "good_share": float(good.mean()),
            "goodput_rps": self.goodput(targets),
            "group_s": self.group_s,
            "good_per_group_s": float(good.sum()) / self.group_s if self.group_s else None,
            "makespan_s": self.makespan_s,
            "num_cached_tokens": self.num_cached_tokens,
            "num_events": self.num_events,
            "scaler_events": [asdict(event) for event in self.scaler_events],
        }
