"""The model that a generation engine serves, with the measured costs of the model's steps and an optional draft
model."""

from dataclasses import dataclass

from baton.modeling.forward.decoder import Decoder
from baton.planning.device_profile import DeviceProfile
from baton.planning.work_cost import WorkCost
from baton.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """Model that an engine serves, with its tokenizer and an optional draft model."""

    decoder: Decoder
    tokenizer: Tokenizer
    draft_model: Decoder | None = None
    """Loaded draft model of `EngineConfig.draft_model`, which has the same vocabulary as `decoder`. None if no draft
    model is configured."""
    cost: WorkCost | None = None
    """Measured costs of steps of `decoder` on this machine. None: estimated costs are used."""
    profile: DeviceProfile | None = None
    """Profile of the device that the engine computes on. None: nominal rates are used."""
