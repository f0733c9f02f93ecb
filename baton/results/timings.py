"""Times of a request's stages, and counts of speculative drafts, as values."""

import operator
from dataclasses import dataclass, field
from typing import Self

from baton.results.prefill_trace import PrefillTrace
from baton.types import DraftRound


@dataclass(frozen=True)
class DraftCounts:
    """Counts of the drafts from one source, over some steps."""

    source: str
    """Name of the source: streaming (drafts by the model itself with attention to few keys) or ngram (drafts found in
    the text). Later versions may add others."""
    num_rounds: int = 0
    """Number of steps that verified drafts. A step counts once for each choice that had drafts."""
    num_drafted: int = 0
    """Number of drafts that were verified."""
    num_accepted: int = 0
    """Number of drafts that were accepted as tokens."""

    @classmethod
    def of(cls, drafts: DraftRound) -> Self:
        """Return the counts of one verification step of one choice."""
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
    """Counts of speculative decoding for a request, over all choices and attempts. Counting starts over when a client
    resumes the request."""

    num_steps: int
    """Number of steps that produced tokens, summed over the choices; at most the number of tokens. A first token that
    was sampled by a prefill chain counts as one step."""
    sources: tuple[DraftCounts, ...]
    """Counts of drafts by source; sources without verified drafts are missing."""

    @property
    def text(self) -> str:
        """The steps and drafts in one readable line."""
        return f"{self.num_steps} steps, drafts accepted: {', '.join(map(str, self.sources))}"


@dataclass(frozen=True)
class Timings:
    """Instants of a request's last attempt, in unix nanoseconds of the server's clock; 0 for a stage that was not
    reached."""

    received_ns: int
    admitted_ns: int
    """Instant at which the request left the queue."""
    leased_ns: int
    """Instant at which the request got a slot."""
    first_token_ns: int
    finished_ns: int
    residency: str = ""
    """Name of the generation group's residency policy, which selects the KV that is attended to; empty if the group had
    none."""
    prefill: PrefillTrace = field(default_factory=PrefillTrace)
    """Record of how the prompt was prefilled. Meant for tuning a cluster."""
    speculation: SpeculationTrace | None = None
    """Counts of speculative decoding; None when no drafts were verified."""

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from the request's arrival to its first token; None if no token was made."""
        return (self.first_token_ns - self.received_ns) / 1e9 if self.first_token_ns else None
