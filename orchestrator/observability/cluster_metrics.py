"""Exports the cluster's present state as metrics. They are computed from one ClusterState at each scrape and not
stored.

Used by `orchestrator.observability.metrics_server`. docs/metrics.md lists all names. Does no I/O. Runs on the thread
that serves the scrape.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.calls.cluster_state import ClusterState, GenerationStatus, GroupState, KvLedger, Scaling

_Samples = Iterable[tuple[tuple[str, ...], float]]
"""Samples of a metric. Each sample is a pair: the label values, and the measured value."""
_STATES = ("free", "leased", "active", "quarantined")
"""States of slots. They are the values of the label `state`. They are also the last parts of the names of the
corresponding status fields."""


class StateCollector(Collector):
    """Collector for prometheus_client that exports the cluster's present state."""

    def __init__(self, read: Callable[[], ClusterState]) -> None:
        """Create a collector. `read` returns the last known state of the cluster. The collector may call it on any
        thread."""
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families. All values are computed from one reading of the cluster's state."""
        state = self._read()
        yield from _of_the_cluster(state)
        if state.scaling is not None:
            yield from _of_scaling(state.scaling)
        yield from _of_groups(state.groups)
        yield from _of_generation_groups({each.name: each.generation for each in state.groups if each.generation})


def _of_the_cluster(state: ClusterState) -> Iterator[Metric]:
    serving = ((), float(not state.why_not_serving))
    yield _gauge("baton_serving", "1 while the cluster's health is SERVING", [serving])
    yield _gauge("baton_degraded", "1 while some group receives no work", [((), float(bool(state.why_degraded)))])
    yield _gauge("baton_queue_requests", "Requests that wait for a slot", [((), state.num_queued)])
    yield _gauge(
        "baton_queue_tokens", "Prompt tokens of requests that wait for a slot", [((), state.num_queued_tokens)]
    )
    yield _gauge("baton_running_requests", "Requests that have left the queue", [((), state.num_running)])
    text = "Attempts whose generation group prefilled because no prefill group was ready in time"
    yield _counter("baton_degraded_prefills", text, [((), state.num_degraded)])
    yield _gauge("baton_info", "Version of the orchestrator, as a label", [((state.version,), 1)], "version")


def _of_scaling(scaling: Scaling) -> Iterator[Metric]:
    wanted = [(("prefill",), scaling.num_prefill), (("generate",), scaling.num_generate)]
    yield _gauge("baton_scaling_groups", "Number of groups that the autoscaler requests", wanted, "role")
    latencies = [(("ttft_p95",), scaling.ttft_p95_s), (("itl_p95",), scaling.itl_p95_s)]
    text = "Latencies that the autoscaler predicts for the requested groups; infinite in an overload"
    yield _gauge("baton_scaling_predicted_seconds", text, latencies, "latency")
    yield _gauge(
        "baton_scaling_forecast_rate", "Requests a second that the autoscaler expects", [((), scaling.forecast_rate)]
    )


def _of_groups(groups: Sequence[GroupState]) -> Iterator[Metric]:
    names = [(group.name, group.role) for group in groups]
    for name, text, values in (
        ("ready", "1 while the group may receive requests", [group.is_ready for group in groups]),
        ("drained", "1 while the group is drained", [group.is_drained for group in groups]),
        ("broken", "1 while the group's circuit breaker is open", [group.is_broken for group in groups]),
        ("requests", "Requests of this orchestrator that the group serves", [group.num_requests for group in groups]),
        ("leaked", "Slots or jobs that no known request has held for over 2 s", [group.num_leaked for group in groups]),
    ):
        samples = list(zip(names, map(float, values), strict=True))
        yield _gauge(f"baton_group_{name}", text, samples, "group", "role")
    stores = [((group.name,), store) for group in groups if (store := group.prefix_store) is not None]
    held = [(name, store.num_bytes) for name, store in stores]
    yield _gauge("baton_prefix_store_bytes", "Bytes of KV in the prefix store of the group's node", held, "group")
    limits = [(name, store.limit_bytes) for name, store in stores]
    yield _gauge(
        "baton_prefix_store_limit_bytes", "Capacity of the prefix store of the group's node, in bytes", limits, "group"
    )
    fetched = [(name, store.num_bytes_fetched) for name, store in stores]
    yield _counter(
        "baton_prefix_fetched_bytes", "Bytes of KV that the group fetched from other nodes' stores", fetched, "group"
    )
    sent = [(name, store.num_bytes_sent) for name, store in stores]
    yield _counter(
        "baton_prefix_sent_bytes", "Bytes of KV that the group sent from its node's store to other nodes", sent, "group"
    )


def _of_generation_groups(groups: Mapping[str, GenerationStatus]) -> Iterator[Metric]:
    """Yield the metrics that generation groups report. Groups that do not answer have no samples."""

    def of_each(number: Callable[[GenerationStatus], float]) -> _Samples:
        return [((name,), number(status)) for name, status in groups.items()]

    def by_state(prefix: str, ledger: Callable[[GenerationStatus], GenerationStatus | KvLedger]) -> _Samples:
        keys = [(name, state) for name in groups for state in _STATES]
        return [((name, state), getattr(ledger(groups[name]), f"{prefix}_{state}")) for name, state in keys]

    policies = [
        ((name, status.residency, "approximate" if status.is_approximate else "exact"), 1.0)
        for name, status in groups.items()
    ]
    text = "Constant 1; the labels are the residency policy and its attention"
    yield _gauge("baton_group_residency", text, policies, "group", "residency", "attention")
    slots = by_state("num", lambda status: status)
    yield _gauge("baton_slots", "Number of slots, by state", slots, "group", "state")
    promised = by_state("num_bytes", lambda status: status.kv)
    yield _gauge("baton_kv_bytes", "Bytes of KV memory, by the state of their slots", promised, "group", "state")
    held = of_each(lambda status: status.num_bytes_held)
    yield _gauge("baton_kv_held_bytes", "Bytes of KV memory that are committed", held, "group")
    unbalanced = of_each(lambda status: bool(status.imbalance))
    yield _gauge("baton_ledger_imbalance", "1 while the counts of slots or bytes do not add up", unbalanced, "group")
    preemptions = of_each(lambda status: status.num_preemptions)
    yield _counter("baton_preemptions", "Sequences preempted to free memory for older ones", preemptions, "group")
    not_finite = of_each(lambda status: status.num_not_finite)
    text = "Sequences that ended because their logits were not finite"
    yield _counter("baton_not_finite_sequences", text, not_finite, "group")
    drafting = {name: status.speculation for name, status in groups.items() if status.HasField("speculation")}
    sources = [(name, source.counts) for name, each in drafting.items() for source in each.sources]
    drafts = [
        ((name, each.source, end), num)
        for name, each in sources
        for end, num in (("accepted", each.num_accepted), ("rejected", each.num_drafted - each.num_accepted))
    ]
    text = "Drafts of speculative decoding that were verified"
    yield _counter("baton_drafts", text, drafts, "group", "source", "end")
    of_rows = [((name, each.source), each.num_rounds) for name, each in sources]
    text = "Verification steps, counted for each sequence with drafts"
    yield _counter("baton_draft_rounds", text, of_rows, "group", "source")
    rounds = [
        ((name, kind), value)
        for name, each in drafting.items()
        for kind, value in (("predicted", each.predicted_s), ("measured", each.measured_s))
    ]
    yield _gauge("baton_round_seconds", "Seconds of the latest draft round and its step", rounds, "group", "kind")
    stores = {name: status.prefix_store for name, status in groups.items() if status.HasField("prefix_store")}
    read = [
        ((name, tier), num_bytes)
        for name, store in stores.items()
        for tier, num_bytes in (
            ("memory", store.num_bytes_read - store.num_disk_bytes_read),
            ("disk", store.num_disk_bytes_read),
        )
    ]
    yield _counter("baton_prefix_read_bytes", "Bytes of KV loaded from the node's store", read, "group", "tier")
    stored = [((name,), store.num_bytes_stored) for name, store in stores.items()]
    yield _counter("baton_prefix_stored_bytes", "Bytes of KV of answers stored in the node's store", stored, "group")


def _gauge(name: str, text: str, samples: _Samples, *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), samples)


def _counter(name: str, text: str, samples: _Samples, *labels: str) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=labels), samples)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: _Samples) -> Metric:
    for values, value in samples:
        family.add_metric(values, value)
    return family
