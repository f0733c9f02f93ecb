"""Report of a chaos run: the outcome and output of each request, and the violated conditions."""

import enum
from collections import Counter
from dataclasses import dataclass, field

from baton.errors import BatonError, DeadlineExceededError, LeaseError, RequestCancelledError, ResourceExhaustedError
from baton.results.completion import Completion, Usage
from baton_lab.chaos.schedule import Ask, Blow, Schedule


class Outcome(enum.StrEnum):
    """Outcome of a request."""

    ANSWERED = "answered"
    LEFT = "left"
    """The client cancelled the request."""
    LATE = "late"
    """The request's deadline passed."""
    REFUSED = "refused"
    """The request was refused because it could not be answered before its deadline."""
    FAILED = "failed"
    """The request ended with a retryable error."""
    WRONG = "wrong"
    """The request ended in a way that is never allowed."""


def outcome_of(error: BatonError, ask: Ask) -> Outcome:
    """Return the outcome of the request `ask`, which ended with `error`."""
    if ask.leave is not None and isinstance(error, RequestCancelledError):
        return Outcome.LEFT
    if ask.deadline_s is not None and isinstance(error, DeadlineExceededError):
        return Outcome.LATE
    if ask.deadline_s is not None and isinstance(error, ResourceExhaustedError):
        return Outcome.REFUSED
    return Outcome.FAILED if error.retryable or isinstance(error, LeaseError) else Outcome.WRONG


@dataclass(frozen=True)
class Answer:
    """The result of one request."""

    ask: Ask
    outcome: Outcome
    output: Completion
    """All output that the client received."""
    error: str
    """Message of the error that the request ended with; empty if it was answered."""
    complaints: tuple[str, ...]
    """Descriptions of the conditions that this request violated."""


@dataclass
class Report:
    """The result of running one schedule."""

    schedule: Schedule
    answers: list[Answer] = field(default_factory=list)
    blows: list[tuple[Blow, bool]] = field(default_factory=list)
    """Process faults that were due. The bool of each is True if the target process was running, so that it was hit."""
    notes: list[str] = field(default_factory=list)
    """One line of text for each engine fault, which describes its outcome."""
    num_calls_struck: int = 0
    num_exceptions: int = 0
    """Number of tolerated differences from the run without faults: tokens for which two candidates had almost equal
    scores."""
    complaints: list[str] = field(default_factory=list)
    """Descriptions of the violated conditions; empty if all conditions were met."""
    settled_s: float = 0.0
    """Seconds from the end of the last request until the cluster had released all slots, KV memory and jobs."""
    took_s: float = 0.0

    @property
    def outcomes(self) -> Counter[Outcome]:
        """Number of requests by outcome."""
        return Counter(answer.outcome for answer in self.answers)

    @property
    def num_tokens(self) -> int:
        """Total number of tokens that clients received."""
        return sum(len(choice.tokens) for answer in self.answers for choice in answer.output.choices)

    @property
    def num_by_chains(self) -> int:
        """Number of requests whose last attempt was prefilled by a chain of prefill ranks."""
        timings = [answer.output.timings for answer in self.answers]
        return sum(each is not None and bool(each.prefill.ranks) for each in timings)

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens that were found in a prefix cache instead of computed. For each request, the last
        attempt counts."""
        return sum(usage.num_cached_tokens for usage in self._usages)

    @property
    def num_retried(self) -> int:
        """Number of requests that the cluster attempted more than once."""
        return sum(usage.num_attempts > 1 for usage in self._usages)

    @property
    def num_resumed(self) -> int:
        """Number of requests whose client reconnected and resumed the stream."""
        return sum(answer.output.num_resumes > 0 for answer in self.answers)

    @property
    def num_hit(self) -> int:
        """Number of process faults whose target process was running."""
        return sum(hit for _, hit in self.blows)

    @property
    def outcomes_text(self) -> str:
        """Text with the number of requests for each outcome."""
        return ", ".join(f"{self.outcomes[each]} {each.value}" for each in Outcome if self.outcomes[each])

    @property
    def _usages(self) -> list[Usage]:
        return [answer.output.usage for answer in self.answers if answer.output.usage is not None]

    def __str__(self) -> str:
        failures = {answer.error for answer in self.answers if answer.outcome is Outcome.FAILED}
        return (
            f"seed {self.schedule.seed}: {self.outcomes_text}; "
            f"{self.num_by_chains} by chains, {self.num_retried} retried, {self.num_resumed} resumed; "
            f"{self.num_hit} of {len(self.schedule.blows)} blows, {self.num_calls_struck} calls struck; "
            f"{self.num_tokens} tokens, {self.num_cached_tokens} cached; nothing held after {self.settled_s:.1f} s; "
            f"{self.took_s:.1f} s"
            + "".join(f"\n  failed with {each}" for each in sorted(failures))
            + "".join(f"\n  {each}" for each in self.notes)
            + "".join(f"\n  did not hold: {each}" for each in self.complaints)
        )
