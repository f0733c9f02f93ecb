"""The model that a generation engine serves, with the costs of the model's steps and an optional draft model."""

from dataclasses import dataclass
from functools import cached_property, partial

import torch

from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.weight_sizes import bytes_per_step
from baton.modeling.kernels.triton.launch import num_compiled
from baton.planning.device_profile import DeviceProfile
from baton.planning.gpus import gpu_rank
from baton.planning.hardware import cpu_rank, derive_step
from baton.planning.step_cost import StepCost
from baton.text.core_tokenizer import CoreTokenizer
from generate_workers.engine.model_shape import model_shape


@dataclass(frozen=True)
class ServedModel:
    """Model that one engine serves, with its tokenizer and an optional draft model."""

    decoder: Decoder
    tokenizer: CoreTokenizer
    draft_model: Decoder | None = None
    """Loaded draft model of `EngineConfig.draft_model`, which has the same vocabulary as `decoder`. None if no draft
    model is configured."""
    profile: DeviceProfile | None = None
    """Profile of the device that the engine computes on. None: nominal rates are used."""

    @cached_property
    def step_cost(self) -> StepCost:
        """Costs of steps of `decoder`, which the engine learns from its steps."""
        return step_cost(self.decoder, self.profile)


def step_cost(decoder: Decoder, profile: DeviceProfile | None) -> StepCost:
    """Return a StepCost for a model that has not run yet. It starts with the costs that follow from the model's bytes
    and FLOPs at the rates of `profile`, or at nominal rates if that is None."""
    shape = model_shape(decoder.config, decoder.dtype.itemsize)
    where = decoder.device.torch_device
    if profile is not None:
        rates = profile.hardware
    elif where.type == "cuda":
        rates = gpu_rank(torch.cuda.get_device_name(where), shape.dtype_bytes)
    else:
        rates = cpu_rank(torch.get_num_threads(), shape.dtype_bytes)
    cost = derive_step(shape, rates, weight_bytes=bytes_per_step(decoder.weights))
    return StepCost(cost, shape.num_layers * rates.issue_s, partial(num_compiled, where))
