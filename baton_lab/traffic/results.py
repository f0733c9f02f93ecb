"""Results of a simulated trace: latencies, goodput, cost, and the actions of a scaling policy. Pure."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton_lab.traffic.gaps import GapHistogram
from baton_lab.traffic.traces.trace import Trace

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Targets:
    """Maximum latencies of a good request."""

    ttft_s: float = 2.0
    """Maximum seconds to the first token."""
    itl_s: float = 0.05
    """Maximum of the mean seconds between the tokens of a request."""


@dataclass(frozen=True)
class ScalerEvent:
    """One change by a scaling policy. In advisory mode, a change that it would have made."""

    time_s: float
    what: str
    """Change of prefill:generation groups, for example 2:2 -> 2:3."""
    why: str
    """The change, its reason and its terms in one line."""


@dataclass(frozen=True)
class Results:
    """Results of one run. Times are arrays with one entry per request, NaN if the request was refused."""

    trace: Trace
    first_s: NDArray[np.float64]
    """Times of first tokens, in seconds since the start of the trace."""
    end_s: NDArray[np.float64]
    """Times of last tokens, in seconds since the start of the trace."""
    gaps: GapHistogram
    group_s: float
    """Total seconds that all groups existed."""
    num_events: int
    num_cached_tokens: int
    scaler_events: tuple[ScalerEvent, ...] = ()

    @property
    def ttft_s(self) -> NDArray[np.float64]:
        """Return the seconds from arrival to first token of each request; NaN if it was refused."""
        return self.first_s - self.trace.arrivals_s

    @property
    def itl_s(self) -> NDArray[np.float64]:
        """Return the mean seconds between the tokens of each request; 0 for answers of one token, NaN for refused
        requests."""
        return (self.end_s - self.first_s) / np.maximum(self.trace.output_tokens - 1, 1)

    @property
    def makespan_s(self) -> float:
        """Return the seconds from the start of the trace to the end of the last request."""
        return float(np.nanmax(self.end_s)) if not np.all(np.isnan(self.end_s)) else 0.0

    def is_good(self, targets: Targets) -> NDArray[np.bool_]:
        """Return for each request whether it met both targets; False for refused requests."""
        return (self.ttft_s <= targets.ttft_s) & (self.itl_s <= targets.itl_s)

    def goodput(self, targets: Targets) -> float:
        """Return the number of good requests per second of the trace's duration."""
        return float(self.is_good(targets).sum()) / max(self.trace.duration_s, 1e-9)

    def summary(self, targets: Targets) -> dict[str, Any]:
        """Return the results as plain values, for tables and JSON."""
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
