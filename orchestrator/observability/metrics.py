"""Metrics of requests: histograms and counters in a registry of this orchestrator. Most are updated when a request
ends.

Called by `orchestrator.scheduler`. The present state of the cluster is not part of these metrics; `cluster_metrics`
reads it at each scrape. docs/metrics.md lists all names, and their counterparts in OpenTelemetry. Written on the event
loop, read on any thread.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from baton.errors import BatonError
from baton.results.stages import first_token_stages
from baton.results.timings import Timings
from orchestrator.requests.record import Finished, RequestRecord

_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_REQUEST_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_RATIOS = (0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)


class Metrics:
    """Histograms and counters of all requests since this orchestrator started."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        """Registry of this orchestrator only. Two orchestrators in one process have separate metrics."""
        self._first_token = self._histogram(
            "baton_time_to_first_token_seconds", "Seconds from a request's arrival to its first token", _FIRST_TOKEN_S
        )
        self._stages = self._histogram(
            "baton_first_token_stage_seconds",
            "Seconds of each stage of the time to the first token",
            _FIRST_TOKEN_S,
            "stage",
        )
        self._ranks = self._histogram(
            "baton_prefill_rank_seconds",
            "Seconds of a rank's computation of its chunk, waits included",
            _FIRST_TOKEN_S,
            "rank",
        )
        self._waits = self._histogram(
            "baton_prefill_rank_wait_seconds",
            "Seconds that a rank waited for earlier ranks' KV",
            _FIRST_TOKEN_S,
            "rank",
        )
        self._token = self._histogram(
            "baton_time_per_output_token_seconds", "Mean seconds between two tokens of a choice, by request", _TOKEN_S
        )
        self._request = self._histogram(
            "baton_request_duration_seconds", "Seconds from a request's arrival to its end", _REQUEST_S
        )
        self._ratio = self._histogram(
            "baton_predicted_over_measured_ratio", "Ratio of predicted to measured seconds", _RATIOS, "prediction"
        )
        self._requests = self._counter("baton_requests", "Requests that have ended, by error", "error")
        self._choices = self._counter("baton_choices", "Choices that have ended, by reason", "reason")
        self._refused = self._counter("baton_requests_refused", "Requests that the queue refused, by error", "error")
        self._tokens = self._counter("baton_tokens", "Tokens of requests that have ended", "type")
        self._cached = self._counter("baton_cached_tokens", "Prompt tokens whose KV was cached from an earlier prompt")
        self._attempts = self._counter("baton_attempts", "Attempts at requests that have ended")
        self._failures = self._counter("baton_attempt_failures", "Attempts that failed, by error", "error")
        self._decisions = self._counter(
            "baton_disagg_decisions", "Prefills, by the reason for their placement", "reason"
        )
        self._widths = self._counter("baton_prefill_widths", "Prefills by chains, by number of ranks", "width")
        self._pushed = self._counter("baton_kv_pushed_bytes", "Bytes of KV that chains pushed to generation groups")
        self._shared = self._counter("baton_kv_shared_bytes", "Bytes of KV that chains pushed through shared memory")
        text = "Fetches of cached KV from another node: complete or short"
        self._fetches = self._counter("baton_prefix_fetches", text, "end")
        self._scalings = self._counter(
            "baton_scaling_changes", "Changes to groups that the autoscaler requested", "move"
        )

    def refused(self, error: BatonError) -> None:
        """Count a request that was refused before it entered the queue."""
        self._refused.labels(type(error).__name__).inc()

    def scaled(self, move: str, num_groups: int) -> None:
        """Count a decision of the autoscaler. `move` is the kind of change. `num_groups` is the number of groups to
        change, which is added to the counter."""
        self._scalings.labels(move).inc(num_groups)

    def attempt_failed(self, error: BatonError) -> None:
        """Count a failed attempt at a request. The request may be attempted again."""
        self._failures.labels(type(error).__name__).inc()

    def ended(self, record: RequestRecord, finished: Finished) -> None:
        """Count a request that has ended, and add its durations to the histograms."""
        timings, usage, placement = finished.timings, finished.usage, finished.timings.prefill.placement
        self._requests.labels("" if finished.error is None else type(finished.error).__name__).inc()
        for reason in finished.reasons:
            self._choices.labels(reason.value).inc()
        self._tokens.labels("input").inc(usage.num_prompt_tokens)
        self._tokens.labels("output").inc(usage.num_output_tokens - record.request.num_given)
        self._cached.inc(usage.num_cached_tokens)
        self._attempts.inc(usage.num_attempts)
        self._request.observe(max(timings.finished_ns - timings.received_ns, 0) / 1e9)
        if (first_token_s := timings.time_to_first_token_s) is not None:
            self._first_token.observe(first_token_s)
        for stage, at in first_token_stages(timings):
            self._stages.labels(stage).observe((at.end_ns - at.start_ns) / 1e9)
        num_between = usage.num_output_tokens - record.request.num_given - record.request.num_slots
        if num_between > 0:
            span_s = (record.last_token_ns - record.first_token_ns) / 1e9
            self._token.observe(max(span_s, 0.0) * record.request.num_slots / num_between)
        if placement is not None and timings.leased_ns and not record.request.num_given:
            self._decisions.labels(placement.reason).inc()
        if (fetch := timings.prefill.fetch) is not None:
            self._fetches.labels("short" if fetch.shortfall else "complete").inc()
            if not fetch.shortfall:
                self.predicted("prefix_fetch", fetch.predicted_s, fetch.took_s)
        self._prefilled(timings)
        if usage.num_attempts == 1:
            self._prefilled_locally(timings)

    def predicted(self, prediction: str, predicted_s: float, measured_s: float) -> None:
        """Add one sample to the histogram of prediction accuracy: `predicted_s / measured_s`. `prediction` is the name
        of the predicted duration. Samples with a measured time of 0 are ignored."""
        if measured_s > 0:
            self._ratio.labels(prediction).observe(predicted_s / measured_s)

    def _prefilled(self, timings: Timings) -> None:
        """Observe the durations and the numbers of bytes that the ranks of a chain have reported."""
        ranks, width = timings.prefill.ranks, timings.prefill.width
        for rank in ranks:
            label = str(rank.rank)
            self._ranks.labels(label).observe(max(rank.end_ns - rank.start_ns, 0) / 1e9)
            self._waits.labels(label).observe(rank.wait_s)
            self._pushed.inc(rank.num_bytes_pushed)
            self._shared.inc(rank.num_bytes_shared)
        if width is not None:
            self._widths.labels(str(width.width)).inc()
            if ranks and width.predicted_s is not None:
                measured_s = (max(rank.end_ns for rank in ranks) - timings.leased_ns) / 1e9
                self.predicted("prefill", width.predicted_s, measured_s)

    def _prefilled_locally(self, timings: Timings) -> None:
        """Observe the ratio of the predicted to the measured duration of a prefill by the generation group, if it was
        predicted."""
        placement, took_ns = timings.prefill.placement, timings.first_token_ns - timings.leased_ns
        if placement is not None and placement.is_local and placement.local and timings.first_token_ns:
            predicted_s = placement.local.own_s - placement.local.fetch_s  # a fetch ends before the slot is leased
            self.predicted("local_prefill", predicted_s, took_ns / 1e9)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)
