"""Output of a request, and the description of the served model."""

from dataclasses import dataclass

from baton.results.timings import Timings
from baton.types import FinishReason, SampledToken


@dataclass(frozen=True)
class Usage:
    """Numbers of tokens and attempts of a request."""

    num_prompt_tokens: int
    num_output_tokens: int
    """Number of output tokens of all choices, including tokens that were sent before the client resumed the stream."""
    num_attempts: int
    """Number of times that the server attempted the request. The count restarts when a client resumes the request."""
    num_cached_tokens: int = 0
    """Number of prompt tokens whose KV the last attempt took from the prefix cache instead of computing it."""


@dataclass(frozen=True)
class Choice:
    """One output (choice) of a request. It is partial until the choice has ended."""

    index: int
    text: str
    tokens: tuple[SampledToken, ...]
    finish: FinishReason | None
    """Reason why the choice ended. None while the choice is running."""


@dataclass(frozen=True)
class Completion:
    """Output of a request that is streamed. It is partial until the stream has ended."""

    request_id: str
    choices: tuple[Choice, ...]
    prompt: tuple[SampledToken, ...]
    """Tokens of the prompt with their logprobs. Empty unless the request asked for prompt logprobs."""
    model: str
    """Name of the served model; empty until the server has accepted the request."""
    seed: int | None
    """Seed of the sampling. A request with equal parameters and this seed gets the same tokens. None until the server
    has accepted the request."""
    exact: bool | None
    """True: all tokens were computed with full attention, and are the same as without speculative decoding. False: some
    tokens may be computed with an approximate residency policy (`timings.residency`). None: the server has not accepted
    the request yet."""
    num_prompt_tokens: int | None
    """Number of prompt tokens; None until the server has accepted the request."""
    usage: Usage | None
    """Numbers of tokens and attempts, from the server's last message. None while this message has not arrived. It never
    arrives if the stream breaks off."""
    timings: Timings | None
    """Start and end times of the request's stages, from the server's last message. None while this message has not
    arrived. It never arrives if the stream breaks off."""
    num_resumes: int
    """Number of times that the client lost the connection to the server and resumed the stream."""

    @property
    def text(self) -> str:
        """Output text of the first choice so far."""
        return self.choices[0].text

    @property
    def tokens(self) -> tuple[SampledToken, ...]:
        """Tokens of the first choice, in order."""
        return self.choices[0].tokens

    @property
    def finish(self) -> FinishReason | None:
        """Reason why the first choice ended. None while the choice is running."""
        return self.choices[0].finish


@dataclass(frozen=True)
class ModelInfo:
    """Description of the served model, and its limits."""

    name: str
    max_tokens: int
    """Maximum total number of tokens in prompt and output."""
    vocab_size: int
    dtype: str
    has_chat_template: bool
    layout_fingerprint: str
    """Fingerprint of the KV layout (KvLayout.fingerprint). Groups with equal fingerprints store KV in the same layout.
    """
