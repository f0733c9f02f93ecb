"""Predictions of `baton plan`, for its tables and its plots."""

from dataclasses import dataclass

from baton.planning.chips import Chip
from baton_lab.study.roofline import ServedModel


@dataclass(frozen=True)
class StepCell:
    """The prediction for one batch at one context length."""

    batch: int
    context: int
    kv_bytes: float
    total_bytes: float
    """Bytes of weights and KV together."""
    fits: bool
    step_s: float
    attention_s: float
    linear_s: float
    other_s: float
    bound: str
    """The largest part of the step: kv, weights, compute, or calls."""
    tokens_s: float
    """Tokens a second of all rows together."""


@dataclass(frozen=True)
class StepForecast:
    """Everything that `baton plan` prints."""

    title: str
    model: ServedModel
    chip: Chip
    num_chips: int
    critical_batch: float
    largest_batch: dict[int, int]
    """Rows that fit into memory, by context length."""
    cells: tuple[StepCell, ...]


@dataclass(frozen=True)
class RoundCell:
    """The prediction of speculation for one batch at one context length."""

    batch: int
    context: int
    fits: bool
    """True if weights and KV fit into memory, those of a draft model included."""
    kv_share: float
    """Part of a plain step's time that goes into reading KV."""
    num_drafts: int
    """Drafts of each row; 0: plain steps are best."""
    draft_keys: int
    num_tokens: float
    """Tokens that each row gets from a round, on average."""
    plain_s: float
    """Seconds of a plain step."""
    draft_s: float
    """Seconds of one draft step."""
    verify_s: float
    """Seconds of the step that verifies the drafts."""
    draft_ratio: float
    """Time of a draft step as a part of a plain step's."""
    verify_ratio: float
    """Time of the step that verifies as a multiple of a plain step's."""
    speedup: float
    """Tokens a second as a multiple of those of plain steps."""
    tokens_s: float
    """Tokens a second of all rows together."""


@dataclass(frozen=True)
class SpeculationForecast:
    """Everything that `baton plan --speculation` prints."""

    title: str
    model: ServedModel
    draft_model: ServedModel | None
    """The model that drafts; None: the model itself."""
    chip: Chip
    num_chips: int
    acceptances: dict[int, float]
    """Probability that a draft is accepted, by the keys that a draft step attends to."""
    pays_from: dict[int, int | None]
    """Least tokens of context at which drafts pay, by batch; None: at no length up to the longest requested."""
    cells: tuple[RoundCell, ...]
