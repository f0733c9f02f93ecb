"""Writes a line of the log for each attempt that fails and for each request that ends.

Called by `orchestrator.controller`. On the loop.
"""

import logging

from baton.errors import BatonError
from orchestrator.requests.record import Finished, RequestRecord

logger = logging.getLogger(__name__)


def log_failure(record: RequestRecord, error: BatonError) -> None:
    """Log that the request's present attempt has failed."""
    logger.warning(
        "attempt failed request=%s attempt=%d state=%s output_tokens=%d error=%s: %s",
        *(record.request_id, record.attempt.number, record.state.value, record.num_output_tokens),
        *(type(error).__name__, error),
    )


def log_end(record: RequestRecord, finished: Finished) -> None:
    """Log how the request has ended, with its times."""
    usage, timings = finished.usage, finished.timings
    first_token_s = timings.time_to_first_token_s
    logger.info(
        "finished request=%s reason=%s prompt_tokens=%d output_tokens=%d attempts=%d queued_s=%.3f first_token_s=%s "
        "total_s=%.3f error=%s",
        *(record.request_id, ",".join(reason.value for reason in finished.reasons)),
        *(usage.num_prompt_tokens, usage.num_output_tokens, usage.num_attempts),
        max(0.0, (timings.admitted_ns - timings.received_ns) / 1e9),
        "none" if first_token_s is None else f"{first_token_s:.3f}",
        (timings.finished_ns - timings.received_ns) / 1e9,
        "none" if finished.error is None else f"{type(finished.error).__name__}: {finished.error}",
    )
