"""Predictions of `baton plan`, for its tables and its plots."""

from dataclasses import dataclass

from baton.planning.chips import Chip
from baton_lab.study.roofline import ServedModel


@dataclass(frozen=True)
class StepCell:
    """Prediction for one batch size at one context length."""

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
    """Name of the largest component of the step's time: kv, weights, compute or calls."""
    tokens_s: float
    """Tokens per second of all sequences together."""


@dataclass(frozen=True)
class StepForecast:
    """Results that `baton plan` prints."""

    title: str
    model: ServedModel
    chip: Chip
    num_chips: int
    critical_batch: float
    largest_batch: dict[int, int]
    """Number of sequences that fit into memory, by context length."""
    cells: tuple[StepCell, ...]


@dataclass(frozen=True)
class RoundCell:
    """Prediction of speculation for one batch size at one context length."""

    batch: int
    context: int
    fits: bool
    """True if weights and KV fit into memory, including those of a draft model."""
    kv_share: float
    """Fraction of a plain step's time that is spent on reading KV."""
    num_drafts: int
    """Number of drafts per sequence; 0: plain steps are best."""
    draft_keys: int
    num_tokens: float
    """Mean number of tokens that a round yields per sequence."""
    plain_s: float
    """Seconds of a plain step."""
    draft_s: float
    """Seconds of one draft step."""
    verify_s: float
    """Seconds of the step that verifies the drafts."""
    draft_ratio: float
    """Time of a draft step divided by the time of a plain step."""
    verify_ratio: float
    """Time of the verification step divided by the time of a plain step."""
    speedup: float
    """Tokens per second divided by those of plain steps."""
    tokens_s: float
    """Tokens per second of all sequences together."""


@dataclass(frozen=True)
class SpeculationForecast:
    """Results that `baton plan --speculation` prints."""

    title: str
    model: ServedModel
    draft_model: ServedModel | None
    """Draft model. None: the served model drafts for itself."""
    chip: Chip
    num_chips: int
    acceptances: dict[int, float]
    """Probability that a draft is accepted, by the number of keys that a draft step attends to."""
    pays_from: dict[int, int | None]
    """Smallest context length in tokens at which drafts pay, by batch size; None: at no length up to the maximum."""
    cells: tuple[RoundCell, ...]
