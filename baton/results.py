"""What a client receives besides tokens, as values. All are frozen and safe to share between threads."""

from dataclasses import dataclass, field
from typing import Self

from baton.prefill_trace import PrefillTrace
from baton.types import DraftRound, FinishReason, SampledToken


@dataclass(frozen=True)
class Usage:
    """The tokens and attempts that a request took."""

    num_prompt_tokens: int
    num_output_tokens: int
    """Output tokens of all choices, those before a resumption included."""
    num_attempts: int
    """Attempts of the server at the request, since it last took the request up."""
    num_cached_tokens: int = 0
    """Prompt tokens that the last attempt did not compute, because an equal beginning's KV was cached."""


@dataclass(frozen=True)
class DraftCounts:
    """Drafts from one source, over some steps."""

    source: str
    """Name of the way to draft: streaming (the model over few keys) or ngram (the text); others may come."""
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
        return DraftCounts(
            self.source,
            self.num_rounds + other.num_rounds,
            self.num_drafted + other.num_drafted,
            self.num_accepted + other.num_accepted,
        )

    def __str__(self) -> str:
        if not (self.num_rounds and self.num_drafted):
            return f"{self.source} none"
        share, mean = self.num_accepted / self.num_drafted, self.num_accepted / self.num_rounds
        return f"{self.source} {self.num_accepted} of {self.num_drafted} ({share:.0%}; {mean:.1f} a round)"


@dataclass(frozen=True)
class SpeculationTrace:
    """How speculative decoding served a request, over all choices and attempts since the server took the request up."""

    num_steps: int
    """Steps that brought tokens, the sum over the choices: no more than tokens. A first token that a chain sampled
    counts as one."""
    sources: tuple[DraftCounts, ...]
    """Drafts of each source of which any were verified."""

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
    """Residency policy of the generation group, which says what KV is attended to; empty when it had none."""
    prefill: PrefillTrace = field(default_factory=PrefillTrace)
    """How the prompt was prefilled, for those who tune a cluster."""
    speculation: SpeculationTrace | None = None
    """The drafts of speculative decoding; None when none were verified."""

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from the request's arrival to its first token; None if there was none."""
        return (self.first_token_ns - self.received_ns) / 1e9 if self.first_token_ns else None


@dataclass(frozen=True)
class Choice:
    """One of a request's outputs: complete after its end, partial before."""

    index: int
    text: str
    tokens: tuple[SampledToken, ...]
    finish: FinishReason | None
    """Why the choice ended; None while it runs."""


@dataclass(frozen=True)
class Completion:
    """A stream's output: complete after the stream's end, partial before."""

    request_id: str
    choices: tuple[Choice, ...]
    prompt: tuple[SampledToken, ...]
    """The prompt's tokens with their logprobs; empty unless the request asked for them."""
    model: str
    """Name of the served model; empty before the server took the request."""
    seed: int | None
    """Seed that gives the same tokens for the same request; None before the server took the request."""
    exact: bool | None
    """True: full attention and coupled sampling all the way. False: some tokens may come from an approximate policy
    (`timings.residency`). None before the server took the request."""
    num_prompt_tokens: int | None
    """Tokens of the prompt; None before the server took the request."""
    usage: Usage | None
    """Tokens and attempts, from the server's last message; None before it, and in streams that end without it."""
    timings: Timings | None
    """When the request's stages began and ended, from the server's last message; None before it, and in streams that
    end without it."""
    num_resumes: int
    """How often the client took the stream up again after losing the server."""

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def tokens(self) -> tuple[SampledToken, ...]:
        """The tokens of the first choice."""
        return self.choices[0].tokens

    @property
    def finish(self) -> FinishReason | None:
        """Why the first choice ended; None while it runs."""
        return self.choices[0].finish


@dataclass(frozen=True)
class ModelInfo:
    """The model that is served, and its limits."""

    name: str
    max_tokens: int
    """Tokens of prompt and output together, at most."""
    vocab_size: int
    dtype: str
    has_chat_template: bool
    layout_fingerprint: str
    """Fingerprint of the KV layout: equal for groups that store KV alike (KvLayout.fingerprint)."""
