"""Trace of an ended request, with its stages, for OpenTelemetry and for `baton trace`. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from baton.results.completion import Usage
from baton.results.stages import Stage, stages_of
from baton.results.timings import Timings
from baton.types import FinishReason
from orchestrator.requests.record import FailedAttempt


@dataclass(frozen=True)
class Trace:
    """Trace of an ended request: its usage and the timings of its stages."""

    request_id: str
    usage: Usage
    timings: Timings
    reasons: tuple[FinishReason, ...]
    """Finish reason of each choice."""
    error: str = ""
    """Class name of the error that ended the request; empty if all choices ended normally."""
    failures: tuple[FailedAttempt, ...] = ()

    def stages(self) -> Iterator[Stage]:
        """Yield all stages that the request has reached: first those of the whole request, in order, then those of the
        ranks."""
        return stages_of(self.timings, self.usage.num_output_tokens)
