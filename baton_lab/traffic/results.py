"""Results of a trace: latencies, goodput, cost, and the actions of a scaling policy. Pure."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton_lab.traffic.gaps import GapHistogram
from baton_lab.traffic.traces.trace import Trace

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Targets:
    """Latencies that a request must have to count as good."""

    ttft_s: float = 2.0
    """Seconds to the first token, at most."""
    itl_s: float = 0.05
    """Seconds between tokens, the mean of the request's answer, at most."""


@dataclass(frozen=True)
class ScalerEvent:
    """One change that a scaling policy made, or would have made in advisory mode."""

    time_s: float
    what: str
    """Change of prefill:generation groups, like 2:2 -> 2:3."""
    why: str
    """The change, its reason and its terms in one line."""


@dataclass(frozen=True)
class Results:
    """One run: times by request, nan where a request was refused."""

    trace: Trace
    first_s: NDArray[np.float64]
    """Instants of first tokens."""
    end_s: NDArray[np.float64]
    """Instants of last tokens."""
    gaps: GapHistogram
    group_s: float
    """Seconds of all groups together that were paid for."""
    num_events: int
    num_cached_tokens: int
    scaler_events: tuple[ScalerEvent, ...] = ()

    @property
    def ttft_s(self) -> NDArray[np.float64]:
        """Return the seconds from arrival to first token, by request; nan where it was refused."""
        return self.first_s - self.trace.arrivals_s

    @property
    def itl_s(self) -> NDArray[np.float64]:
        """Return the mean seconds between tokens, by request; 0 for answers of one token, nan where it was refused."""
        return (self.end_s - self.first_s) / np.maximum(self.trace.output_tokens - 1, 1)

    @property
    def makespan_s(self) -> float:
        """Return the seconds until the last request has ended."""
        return float(np.nanmax(self.end_s)) if not np.all(np.isnan(self.end_s)) else 0.0

    def is_good(self, targets: Targets) -> NDArray[np.bool_]:
        """Return whether each request met both targets; a refused one did not."""
        return (self.ttft_s <= targets.ttft_s) & (self.itl_s <= targets.itl_s)

    def goodput(self, targets: Targets) -> float:
        """Return the good requests a second, over the time in which requests arrive."""
        return float(self.is_good(targets).sum()) / max(self.trace.duration_s, 1e-9)

    def summary(self, targets: Targets) -> dict[str, Any]:
        """Return the run's numbers as plain values, for tables and JSON."""
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
