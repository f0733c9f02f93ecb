"""The output of a request, and the served model, as values."""

from dataclasses import dataclass

from baton.results.timings import Timings
from baton.types import FinishReason, SampledToken


@dataclass(frozen=True)
class Usage:
    """The tokens and attempts that a request took."""

    num_prompt_tokens: int
    num_output_tokens: int
    """Output tokens of all choices, those before a resumption included."""
    num_attempts: int
    """Attempts of the server at the request, since it last took the request up."""
    num_cached_tokens: int = 0
    """Prompt tokens that the last attempt did not compute, because the KV of an equal prefix was cached."""


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
    """True: full attention and coupled sampling for all tokens. False: some tokens may come from an approximate policy
    (`timings.residency`). None before the server took the request."""
    num_prompt_tokens: int | None
    """Tokens of the prompt; None before the server took the request."""
    usage: Usage | None
    """Tokens and attempts, from the server's last message; None before it, and in streams that end without it."""
    timings: Timings | None
    """When the request's stages began and ended, from the server's last message; None before it, and in streams that
    end without it."""
    num_resumes: int
    """Number of times the client resumed the stream after losing the server."""

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
    """Largest number of tokens of prompt and output together."""
    vocab_size: int
    dtype: str
    has_chat_template: bool
    layout_fingerprint: str
    """Fingerprint of the KV layout: equal for groups that store KV alike (KvLayout.fingerprint)."""
