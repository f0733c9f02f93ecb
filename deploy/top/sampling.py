"""Takes samples of a cluster: its state over gRPC, its metrics over HTTP, and the time. Functions that take samples
block."""

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
"""Values of Prometheus metrics, by pairs (name, sorted labels)."""


@dataclass(frozen=True)
class Snapshot:
    """Sample of a cluster's state and metrics at one time."""

    at_s: float
    """Time of the sample, in seconds of this process's clock."""
    state: ClusterState
    metrics: Samples
    """Metrics of the orchestrator. Empty if they could not be read."""
    complaint: str = ""
    """Reason why the metrics could not be read; empty if they were read."""

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of all samples of the metric `name` that have at least the given labels. Return 0 if there are
        no such samples."""
        wanted = set(labels.items())
        return sum(value for (found, has), value in self.metrics.items() if found == name and wanted <= set(has))


def take(client: Client, clock: Clock) -> Snapshot:
    """Take a sample of the cluster. Blocks for at most some seconds. Raises UnavailableError, DeadlineExceededError or
    UnauthenticatedError if the orchestrator does not return its state."""
    state = client.cluster_state(_ANSWER_S)
    metrics, complaint = _scraped(state.metrics_endpoint)
    return Snapshot(clock.now_s(), state, metrics, complaint)


def parsed(text: str) -> Samples:
    """Parse the text of a Prometheus scrape, and return the values of the metrics."""
    families = text_string_to_metric_families(text)
    return {(each.name, tuple(sorted(each.labels.items()))): each.value for one in families for each in one.samples}


def buckets(before: Samples, after: Samples, name: str) -> list[tuple[float, float]]:
    """Return the buckets of the histogram `name`, for the observations between two samples. A bucket is a pair (upper
    bound, number of observations up to this bound)."""
    found = [
        (float(dict(labels)["le"]), value - before.get((f"{name}_bucket", labels), 0.0))
        for (key, labels), value in after.items()
        if key == f"{name}_bucket"
    ]
    return sorted(found)


def quantile(share: float, of: Iterable[tuple[float, float]]) -> float | None:
    """Return a quantile of a histogram's observations, or None if there are no observations. `share` is the quantile,
    for example 0.95. `of` has pairs (upper bound of a bucket, number of observations up to this bound) in ascending
    order. The result is interpolated linearly within a bucket, as in Prometheus."""
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
