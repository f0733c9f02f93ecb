"""Output of a request, and description of the served model, as values."""

from dataclasses import dataclass

from baton.results.timings import Timings
from baton.types import FinishReason, SampledToken


@dataclass(frozen=True)
class Usage:
    """Number of tokens and attempts of a request."""

    num_prompt_tokens: int
    num_output_tokens: int
    """Number of output tokens of all choices, including tokens from before a resumption."""
    num_attempts: int
    """Number of attempts that the server made at the request. Counting starts over when a client resumes the request.
    """
    num_cached_tokens: int = 0
    """Number of prompt tokens that the last attempt did not compute, because the KV of an equal prefix was cached."""


@dataclass(frozen=True)
class Choice:
    """One output of a request. It is partial while the choice runs, and complete once the choice has ended."""

    index: int
    text: str
    tokens: tuple[SampledToken, ...]
    finish: FinishReason | None
    """Reason why the choice ended; None while it runs."""


@dataclass(frozen=True)
class Completion:
    """Output of a stream. It is partial while the stream runs, and complete once the stream has ended."""

    request_id: str
    choices: tuple[Choice, ...]
    prompt: tuple[SampledToken, ...]
    """Tokens of the prompt with their logprobs; empty unless the request asked for them."""
    model: str
    """Name of the served model; empty until the server has accepted the request."""
    seed: int | None
    """Seed with which an equal request gets the same tokens; None until the server has accepted the request."""
    exact: bool | None
    """True: all tokens came from full attention and coupled sampling. False: some tokens may come from an approximate
    policy (`timings.residency`). None: the server has not accepted the request yet."""
    num_prompt_tokens: int | None
    """Number of prompt tokens; None until the server has accepted the request."""
    usage: Usage | None
    """Number of tokens and attempts, from the server's last message. None until it has arrived, and in streams that end
    without it."""
    timings: Timings | None
    """Times at which the request's stages began and ended, from the server's last message. None until it has arrived,
    and in streams that end without it."""
    num_resumes: int
    """Number of times the client resumed the stream after losing the server."""

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def tokens(self) -> tuple[SampledToken, ...]:
        """Tokens of the first choice."""
        return self.choices[0].tokens

    @property
    def finish(self) -> FinishReason | None:
        """Reason why the first choice ended; None while it runs."""
        return self.choices[0].finish


@dataclass(frozen=True)
class ModelInfo:
    """Description of the served model, and its limits."""

    name: str
    max_tokens: int
    """Largest total number of tokens of prompt and output."""
    vocab_size: int
    dtype: str
    has_chat_template: bool
    layout_fingerprint: str
    """Fingerprint of the KV layout (KvLayout.fingerprint). Groups with equal fingerprints store KV in the same layout.
    """
