"""Times of a request's stages, and counts of draft tokens in speculative decoding."""

import operator
from dataclasses import dataclass, field
from typing import Self

from baton.results.prefill_trace import PrefillTrace
from baton.types import DraftRound


@dataclass(frozen=True)
class DraftCounts:
    """Counts of the drafts from one source."""

    source: str
    """Name of the source of drafts. "streaming": the model itself, with attention to few keys. "ngram": matching text
    in the sequence. Later versions may add names."""
    num_rounds: int = 0
    """Number of steps that verified drafts of this source. A step is counted once for each choice that had drafts."""
    num_drafted: int = 0
    """Number of drafts of this source that were verified."""
    num_accepted: int = 0
    """Number of drafts of this source that were accepted, and therefore became output tokens."""

    @classmethod
    def of(cls, drafts: DraftRound) -> Self:
        """Return the counts of one step that verified drafts of one choice."""
        return cls(drafts.source, 1, drafts.num_drafts, drafts.num_accepted)

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        (source, *mine), (_, *theirs) = vars(self).values(), vars(other).values()
        return DraftCounts(source, *map(operator.add, mine, theirs))

    def __str__(self) -> str:
        if not (self.num_rounds and self.num_drafted):
            return f"{self.source} none"
        share, mean = self.num_accepted / self.num_drafted, self.num_accepted / self.num_rounds
        return f"{self.source} {self.num_accepted} of {self.num_drafted} ({share:.0%}; {mean:.1f} a round)"


@dataclass(frozen=True)
class SpeculationTrace:
    """Counts of speculative decoding for a request, summed over all choices and attempts. The counts restart when a
    client resumes the request."""

    num_steps: int
    """Number of steps that produced tokens, summed over all choices. A first token that a prefill chain sampled counts
    as one step. The number is at most the number of tokens."""
    sources: tuple[DraftCounts, ...]
    """Counts of drafts, one entry for each source of drafts. Sources without verified drafts are omitted."""

    @property
    def text(self) -> str:
        """Description of the counts of steps and drafts in one readable line."""
        return f"{self.num_steps} steps, drafts accepted: {', '.join(map(str, self.sources))}"


@dataclass(frozen=True)
class Timings:
    """Times of the stages in a request's last attempt, in unix nanoseconds of the server's clock. 0 for a stage that
    was not reached."""

    received_ns: int
    admitted_ns: int
    """Time at which the request left the queue, in unix nanoseconds."""
    leased_ns: int
    """Time at which the request got a lease on a slot, in unix nanoseconds."""
    first_token_ns: int
    finished_ns: int
    residency: str = ""
    """Name of the generation group's residency policy, which selects the KV that is attended to. Empty if the group has
    no such policy."""
    prefill: PrefillTrace = field(default_factory=PrefillTrace)
    """Record of how the prompt was prefilled. It is meant for tuning a cluster."""
    speculation: SpeculationTrace | None = None
    """Counts of speculative decoding. None if no drafts were verified."""

    @property
    def time_to_first_token_s(self) -> float | None:
        """Time in seconds from the request's arrival to its first token. None if there is no first token."""
        return (self.first_token_ns - self.received_ns) / 1e9 if self.first_token_ns else None
