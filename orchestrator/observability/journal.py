"""Records the arrivals, refusals, failed attempts and ends of requests in the log, in metrics, in traces and in the
list of requests. Also records the predicted and measured durations of steps.

Called by `orchestrator.scheduler`. Runs on the event loop.
"""

import logging

from baton.calls.cluster_state import StepSample
from baton.errors import BatonError
from baton.planning.step_cost import LearntCosts
from baton.process.clock import Clock
from orchestrator.observability.metrics import Metrics
from orchestrator.observability.request_book import RequestBook
from orchestrator.observability.stages import Trace
from orchestrator.observability.traces import Traces
from orchestrator.requests.record import FailedAttempt, Finished, RequestRecord

logger = logging.getLogger(__name__)


class Journal:
    """Writes the events of one orchestrator's requests to the log, the metrics, the traces and the list of requests."""

    def __init__(self, clock: Clock, traces: Traces) -> None:
        """Create a journal. `traces` receives every request that has ended."""
        self.metrics = Metrics()
        self.traces = traces
        self.book = RequestBook(clock)
        """List of the requests that wait or run, and of the requests that ended most recently."""
        self._clock = clock

    def stepped(self, step: StepSample, costs: LearntCosts | None) -> None:
        """Record how well a generation group's step was predicted: the ratio of its predicted duration to its measured
        duration. `costs`: costs that the group had learnt before; None: not known."""
        if step.num_drafts:
            if step.predicted_s:
                self.metrics.predicted("draft_round", step.predicted_s, step.duration_s)
        elif costs is not None and step.num_rows and not step.num_prefill_tokens:
            predicted_s = costs.plain.plain_s(step.num_rows, step.context_tokens)
            self.metrics.predicted("generation_step", predicted_s, step.duration_s)

    def failed(self, record: RequestRecord, error: BatonError) -> None:
        """Record that the present attempt of the request has failed."""
        name, attempt = type(error).__name__, record.attempt.number
        logger.warning(
            "attempt failed request=%s attempt=%d state=%s output_tokens=%d error=%s: %s",
            *(record.request_id, attempt, record.state.value, record.num_output_tokens, name, error),
        )
        self.metrics.attempt_failed(error)
        record.failures.append(FailedAttempt(attempt, self._clock.unix_ns(), name, str(error)))

    def ended(self, record: RequestRecord, finished: Finished) -> None:
        """Record the end of the request in the log, the metrics and the traces, with its timings."""
        usage, timings, error = finished.usage, finished.timings, finished.error
        first_token_s = timings.time_to_first_token_s
        logger.info(
            "finished request=%s reason=%s prompt_tokens=%d output_tokens=%d attempts=%d queued_s=%.3f "
            "first_token_s=%s total_s=%.3f error=%s",
            *(record.request_id, ",".join(reason.value for reason in finished.reasons)),
            *(usage.num_prompt_tokens, usage.num_output_tokens, usage.num_attempts),
            max(0.0, (timings.admitted_ns - timings.received_ns) / 1e9),
            "none" if first_token_s is None else f"{first_token_s:.3f}",
            (timings.finished_ns - timings.received_ns) / 1e9,
            "none" if error is None else f"{type(error).__name__}: {error}",
        )
        self.metrics.ended(record, finished)
        name, failures = "" if error is None else type(error).__name__, tuple(record.failures)
        trace = Trace(record.request_id, usage, timings, finished.reasons, name, failures)
        self.traces.ended(trace, record.request)
        self.book.ended(record, finished)
