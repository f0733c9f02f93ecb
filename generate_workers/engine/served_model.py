"""Model that a generation engine serves, its draft model, and the measured costs of its steps."""

from dataclasses import dataclass

from baton.modeling.forward.decoder import Decoder
from baton.planning.work_cost import WorkCost
from baton.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """A model with its tokenizer."""

    decoder: Decoder
    tokenizer: Tokenizer
    draft_model: Decoder | None = None
    """The loaded model that `EngineConfig.draft_model` names, with the vocabulary of `decoder`; None if it names
    none."""
    cost: WorkCost | None = None
    """Measured costs of steps of `decoder` on this machine. None: nominal costs."""
