"""Trace of a request that has ended, with its stages, for OpenTelemetry and for `baton trace`. Does no I/O."""

from collections.abc import Iterator
from dataclasses import dataclass

from baton.results.completion import Usage
from baton.results.stages import Stage, stages_of
from baton.results.timings import Timings
from baton.types import FinishReason
from orchestrator.requests.record import FailedAttempt


@dataclass(frozen=True)
class Trace:
    """Trace of a request that has ended: its usage and the timings of its stages."""

    request_id: str
    usage: Usage
    timings: Timings
    reasons: tuple[FinishReason, ...]
    """Finish reason of each choice."""
    error: str = ""
    """Class name of the error that ended the request; empty if all choices ended normally."""
    failures: tuple[FailedAttempt, ...] = ()

    def stages(self) -> Iterator[Stage]:
        """Yield all stages that the request has reached. The stages of the whole request come first, in order. The
        stages of the single prefill ranks follow."""
        return stages_of(self.timings, self.usage.num_output_tokens)
