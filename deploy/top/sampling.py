"""Samples of a cluster: its state over gRPC, its metrics over HTTP, and the time. Blocks."""

import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from baton.calls.cluster_state import ClusterState
from baton.client import Client
from baton.process.clock import Clock

_ANSWER_S = 5.0

Labels = tuple[tuple[str, str], ...]
Samples = Mapping[tuple[str, Labels], float]
"""Values by name and sorted labels."""


@dataclass(frozen=True)
class Snapshot:
    """A cluster at one instant."""

    at_s: float
    """Time of the sample by the clock of this process."""
    state: ClusterState
    metrics: Samples
    """The orchestrator's metrics; empty where they could not be read."""
    complaint: str = ""
    """Reason why the metrics could not be read; empty if they were read."""

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that have at least these labels; 0 if there are no such samples."""
        wanted = set(labels.items())
        return sum(value for (found, has), value in self.metrics.items() if found == name and wanted <= set(has))


def take(client: Client, clock: Clock) -> Snapshot:
    """Take a sample of the cluster. Blocks for at most some seconds. Raises UnavailableError, DeadlineExceededError or
    UnauthenticatedError if the orchestrator does not return its state."""
    state = client.cluster_state(_ANSWER_S)
    metrics, complaint = _scraped(state.metrics_endpoint)
    return Snapshot(clock.now_s(), state, metrics, complaint)


def parsed(text: str) -> Samples:
    """Parse the text of a Prometheus scrape and return its samples."""
    families = text_string_to_metric_families(text)
    return {(each.name, tuple(sorted(each.labels.items()))): each.value for one in families for each in one.samples}


def buckets(before: Samples, after: Samples, name: str) -> list[tuple[float, float]]:
    """Return pairs (upper bound, number of observations up to this bound) of a histogram, for the observations between
    two samples."""
    found = [
        (float(dict(labels)["le"]), value - before.get((f"{name}_bucket", labels), 0.0))
        for (key, labels), value in after.items()
        if key == f"{name}_bucket"
    ]
    return sorted(found)


def quantile(share: float, of: Iterable[tuple[float, float]]) -> float | None:
    """Return the quantile `share` of a histogram's observations, interpolated linearly within its bucket as in
    Prometheus. Return None if there are no observations. `of` are pairs (upper bound, number of observations up to it),
    ascending."""
    counted = list(of)
    if not counted or counted[-1][1] <= 0:
        return None
    wanted, low, below = share * counted[-1][1], 0.0, 0.0
    for bound, count in counted:
        if count >= wanted and count > below:
            return low if bound == float("inf") else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    raise AssertionError("the last bucket counts all")


def _scraped(endpoint: str) -> tuple[Samples, str]:
    if not endpoint:
        return {}, "no metrics: orchestrator.metrics_port is -1"
    try:
        with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=_ANSWER_S) as answer:
            return parsed(answer.read().decode()), ""
    except OSError as error:
        return {}, f"no metrics from {endpoint}: {error}"
