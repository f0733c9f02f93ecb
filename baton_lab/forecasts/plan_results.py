"""Data classes with the predictions of `baton plan`, for its tables and its plots."""

from dataclasses import dataclass

from baton.planning.chips import Chip
from baton_lab.study.roofline import ServedModel


@dataclass(frozen=True)
class StepCell:
    """Prediction of a generation step for one batch size and one context length."""

    batch: int
    context: int
    kv_bytes: float
    total_bytes: float
    """Number of bytes of weights and KV together."""
    fits: bool
    step_s: float
    attention_s: float
    linear_s: float
    other_s: float
    bound: str
    """Name of the component that takes most of the step's time: `kv`, `weights`, `compute` or `calls`."""
    tokens_s: float
    """Output tokens per second of all sequences of the batch together."""


@dataclass(frozen=True)
class StepForecast:
    """Results that `baton plan` prints."""

    title: str
    model: ServedModel
    chip: Chip
    num_chips: int
    critical_batch: float
    largest_batch: dict[int, int]
    """Maximum number of sequences that fit into memory, by context length in tokens."""
    cells: tuple[StepCell, ...]


@dataclass(frozen=True)
class RoundCell:
    """Prediction of speculative decoding for one batch size and one context length."""

    batch: int
    context: int
    fits: bool
    """True if the weights and the KV, including those of a draft model, fit into memory."""
    kv_share: float
    """Fraction of the time of a plain step (without speculation) that is spent on reading KV."""
    num_drafts: int
    """Best number of drafts per sequence in one round (the draft steps and the step that verifies the drafts); 0 if
    plain steps are fastest."""
    draft_keys: int
    num_tokens: float
    """Mean number of output tokens that one round yields for each sequence. A round consists of the draft steps and the
    step that verifies the drafts."""
    plain_s: float
    """Duration in seconds of a plain step, without speculation."""
    draft_s: float
    """Duration in seconds of one draft step."""
    verify_s: float
    """Duration in seconds of the step that verifies the drafts."""
    draft_ratio: float
    """Duration of a draft step divided by the duration of a plain step."""
    verify_ratio: float
    """Duration of the verification step divided by the duration of a plain step."""
    speedup: float
    """Tokens per second with speculation, divided by the tokens per second of plain steps."""
    tokens_s: float
    """Output tokens per second of all sequences of the batch together."""


@dataclass(frozen=True)
class SpeculationForecast:
    """Results that `baton plan --speculation` prints."""

    title: str
    model: ServedModel
    draft_model: ServedModel | None
    """Separate draft model. None: the served model drafts for itself."""
    chip: Chip
    num_chips: int
    acceptances: dict[int, float]
    """Probability that a draft token is accepted, by the number of keys that a draft step attends to."""
    pays_from: dict[int, int | None]
    """Smallest context length in tokens from which speculation is faster than plain steps, by batch size. None: it is
    not faster at any length up to `speculation.LONGEST`."""
    cells: tuple[RoundCell, ...]
