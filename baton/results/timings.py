"""When the stages of a request began and ended, and how its tokens were made, as values."""

import operator
from dataclasses import dataclass, field
from typing import Self

from baton.results.prefill_trace import PrefillTrace
from baton.types import DraftRound


@dataclass(frozen=True)
class DraftCounts:
    """Drafts from one source, over some steps."""

    source: str
    """Name of the proposer: streaming (the model over few keys) or ngram (the text). Later versions may add others."""
    num_rounds: int = 0
    """Steps that verified drafts, counted once for each choice that had drafts."""
    num_drafted: int = 0
    """Drafts that were verified."""
    num_accepted: int = 0
    """Drafts that became tokens."""

    @classmethod
    def of(cls, drafts: DraftRound) -> Self:
        """Return the counts of one step of a choice."""
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
    """How speculative decoding served a request, over all choices and attempts since the server took the request up."""

    num_steps: int
    """Steps that produced tokens, summed over the choices; at most the number of tokens. A first token that a chain
    sampled counts as one step."""
    sources: tuple[DraftCounts, ...]
    """Drafts by source; sources without verified drafts are missing."""

    @property
    def text(self) -> str:
        """The steps and drafts in one line for people."""
        return f"{self.num_steps} steps, drafts accepted: {', '.join(map(str, self.sources))}"


@dataclass(frozen=True)
class Timings:
    """Instants of the request's last attempt, by the server's clock, in unix nanoseconds; 0 for a stage not reached."""

    received_ns: int
    admitted_ns: int
    """When the request left the queue."""
    leased_ns: int
    """When the request got a slot."""
    first_token_ns: int
    finished_ns: int
    residency: str = ""
    """Residency policy of the generation group, which selects the KV that is attended to; empty when it had none."""
    prefill: PrefillTrace = field(default_factory=PrefillTrace)
    """How the prompt was prefilled. Meant for tuning a cluster."""
    speculation: SpeculationTrace | None = None
    """The drafts of speculative decoding; None when none were verified."""

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from the request's arrival to its first token; None if there was none."""
        return (self.first_token_ns - self.received_ns) / 1e9 if self.first_token_ns else None
