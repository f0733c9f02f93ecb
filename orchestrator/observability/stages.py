"""Trace of a request that has ended, with its stages: for OpenTelemetry and for `baton trace`. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from baton.results.completion import Usage
from baton.results.stages import Stage, stages_of
from baton.results.timings import Timings
from baton.types import FinishReason
from orchestrator.requests.record import FailedAttempt


@dataclass(frozen=True)
class Trace:
    """A request that has ended, with its usage and the timings of its stages."""

    request_id: str
    usage: Usage
    timings: Timings
    reasons: tuple[FinishReason, ...]
    """Why each choice ended."""
    error: str = ""
    """Name of the class of the error that ended the request; empty when its choices ended by themselves."""
    failures: tuple[FailedAttempt, ...] = ()

    def stages(self) -> Iterator[Stage]:
        """Yield all stages that the request has reached: those of the whole request in order, then those of ranks."""
        return stages_of(self.timings, self.usage.num_output_tokens)
