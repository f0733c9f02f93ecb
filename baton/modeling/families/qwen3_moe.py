"""The Qwen3-MoE family (Yang et al., 2025): the attention of Qwen3, and in every layer a router with many MLPs
(experts)."""

import dataclasses
import functools
from dataclasses import dataclass

from baton.modeling.families.checkpoint import Checkpoint
from baton.modeling.families.family import load_linear
from baton.modeling.families.fields import Fields
from baton.modeling.families.llama import LlamaModel, read_config
from baton.modeling.forward.experts import ExpertProducts, ExpertsMlp, LinearExperts, StackedExperts, can_stack
from baton.modeling.forward.linear import TorchLinear
from baton.modeling.forward.model_config import ModelConfig

_DEFAULT_ACTIVE = 8
"""Default of transformers for `num_experts_per_tok`."""


@dataclass(frozen=True)
class Qwen3MoeModel(LlamaModel):
    """A model of the Qwen3-MoE family."""

    normalised: bool
    """True if the router weights of a token's experts are divided by their sum."""

    @classmethod
    def read(cls, fields: Fields) -> "Qwen3MoeModel":
        """Read the model from config.json. Raises ModelError if a field is missing, invalid or not supported."""
        remedy = "choose a model with experts in every layer"
        fields.refuse("mlp_only_layers", remedy)
        if fields.count("decoder_sparse_step", 1) != 1:
            raise fields.error("decoder_sparse_step", "is not 1, which is not supported", remedy)
        attention_bias = fields.flag("attention_bias")
        return cls(
            config=_read_config(fields),
            norm_eps=fields.number("rms_norm_eps"),
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=False,
            qk_norm=True,
            normalised=fields.flag("norm_topk_prob"),
        )

    def _mlp(self, checkpoint: Checkpoint, at: str) -> ExpertsMlp:
        config = self.config
        router_ED = checkpoint.take(f"{at}.gate.weight", (config.num_experts, config.hidden_size))
        stacks = can_stack(router_ED.device, router_ED.dtype) and not (checkpoint.int8 or checkpoint.keeps_codes)
        experts = [f"{at}.experts.{number}" for number in range(config.num_experts)]
        products = self._stacked(checkpoint, experts) if stacks else self._linears(checkpoint, experts)
        return ExpertsMlp(TorchLinear(router_ED), products, config.num_active_experts, self.normalised)

    def _linears(self, checkpoint: Checkpoint, experts: list[str]) -> ExpertProducts:
        """Load each expert as two linear layers. Each weight is stored only once, because an expert gets few of a
        prompt's tokens."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        load = functools.partial(load_linear, checkpoint, bias=False, has_many_rows=False)
        gate_up = [load({f"{at}.{name}_proj": inner for name in ("gate", "up")}, hidden, gated=True) for at in experts]
        down = [load({f"{at}.down_proj": hidden}, inner) for at in experts]
        return LinearExperts(tuple(gate_up), tuple(down))

    def _stacked(self, checkpoint: Checkpoint, experts: list[str]) -> ExpertProducts:
        """Load all experts into two tensors."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        gate_up = [(f"{at}.{name}_proj.weight", (inner, hidden)) for at in experts for name in ("gate", "up")]
        down = [(f"{at}.down_proj.weight", (hidden, inner)) for at in experts]
        return StackedExperts(
            checkpoint.fuse(gate_up).view(len(experts), 2 * inner, hidden),
            checkpoint.fuse(down).view(len(experts), hidden, inner),
        )


def _read_config(fields: Fields) -> ModelConfig:
    name = "num_experts" if fields.raw.get("num_local_experts") is None else "num_local_experts"
    num_experts = fields.count(name)
    num_active = fields.count("num_experts_per_tok", _DEFAULT_ACTIVE)
    if num_active > num_experts:
        raise fields.error("num_experts_per_tok", f"{num_active} is more than {name} {num_experts}")
    return dataclasses.replace(
        read_config(fields, ("qwen3_moe",)),
        intermediate_size=fields.count("moe_intermediate_size"),
        num_experts=num_experts,
        num_active_experts=num_active,
    )
