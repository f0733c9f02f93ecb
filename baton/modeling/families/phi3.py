"""The Phi-3 and Phi-4 family (Abdin et al., 2024): Llama's layers, with LongRoPE, and with projections that are stored
fused.

Phi-4-mini rotates only a part of each head. Baton's RoPE requires the rotated dimensions to be first in each half of a
head, so the query and key rows are reordered when they are loaded. The products of queries and keys do not change.

Shape letters: N heads, G kv heads, H head dim, R rotated dimensions of a head, W = (N + 2 G) * H rows of queries, keys
and values, D hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.modeling.families.checkpoint import Checkpoint
from baton.modeling.families.family import load_linear
from baton.modeling.families.fields import Fields
from baton.modeling.families.llama import LlamaModel
from baton.modeling.families.rope_fields import read_rope, read_rotary_dim, rope_parameters
from baton.modeling.forward.layers import GatedMlp
from baton.modeling.forward.linear import Linear, make_linear
from baton.modeling.forward.model_config import ModelConfig

_DEFAULT_CONTEXT = 4096
_DEFAULT_EPS = 1e-5
"""Default of transformers for `rms_norm_eps`."""
_ORIGINAL_CONTEXT = "original_max_position_embeddings"
_OLD_NAMES = ("su", "yarn")
"""Values of the scaling type that mean LongRoPE in early Phi-3 configs."""


@dataclass(frozen=True)
class Phi3Model(LlamaModel):
    """A model of the Phi-3 family."""

    @classmethod
    def read(cls, fields: Fields) -> "Phi3Model":
        """Read the model from config.json. Raises ModelError if a field is missing, invalid or not supported."""
        for name in ("attention_bias", "mlp_bias"):
            fields.refuse(name, "choose a Phi-3 without biases")
        return cls(
            config=_read_config(_renamed(fields)),
            norm_eps=fields.number("rms_norm_eps", _DEFAULT_EPS),
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            qk_norm=False,
        )

    def _qkv(self, checkpoint: Checkpoint, at: str) -> Linear:
        config = self.config
        num_rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        if config.rotary_dim is None:
            return load_linear(checkpoint, {f"{at}.qkv_proj": num_rows}, config.hidden_size, bias=False)
        weight_WD = checkpoint.take(f"{at}.qkv_proj.weight", (num_rows, config.hidden_size))
        return make_linear(self._turning_first(weight_WD, config.rotary_dim), int8=checkpoint.int8)

    def _turning_first(self, weight_WD: Tensor, rotary_dim: int) -> Tensor:
        """Return the rows reordered, so that the rotated dimensions of each query and key come first in each half."""
        config = self.config
        half, rest = rotary_dim // 2, config.head_dim - rotary_dim
        dims = torch.arange(config.head_dim)
        still = dims[rotary_dim:]
        order_H = torch.cat((dims[:half], still[: rest // 2], dims[half:rotary_dim], still[rest // 2 :]))
        heads_XHD = weight_WD.view(-1, config.head_dim, config.hidden_size)
        turned = config.num_heads + config.num_kv_heads
        return torch.cat((heads_XHD[:turned, order_H], heads_XHD[turned:])).flatten(0, 1)

    def _mlp(self, checkpoint: Checkpoint, at: str) -> GatedMlp:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        return GatedMlp(
            load_linear(checkpoint, {f"{at}.gate_up_proj": 2 * inner}, hidden, bias=False, gated=True),
            load_linear(checkpoint, {f"{at}.down_proj": hidden}, inner, bias=False),
        )


def _renamed(fields: Fields) -> Fields:
    """Return the fields with the current name of LongRoPE instead of an early one. If the config does not state the
    shorter context, it is set to transformers' default."""
    name, parameters = rope_parameters(fields)
    kind = parameters.get("rope_type") or parameters.get("type")
    if kind in _OLD_NAMES:
        fields = fields.replaced(name, {**parameters, "rope_type": "longrope"})
    original = fields.count(_ORIGINAL_CONTEXT, _DEFAULT_CONTEXT)
    return fields if _ORIGINAL_CONTEXT in parameters else fields.replaced(_ORIGINAL_CONTEXT, original)


def _read_config(fields: Fields) -> ModelConfig:
    fields.choice("hidden_act", ("silu",), "silu")
    num_heads, hidden_size = fields.count("num_attention_heads"), fields.count("hidden_size")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} attention heads")
    max_position = fields.count("max_position_embeddings", _DEFAULT_CONTEXT)
    head_dim = fields.optional_count("head_dim") or fields.head_dim(hidden_size, num_heads)
    rotary_dim = read_rotary_dim(fields, head_dim)
    rope_theta, rope_scaling = read_rope(fields, head_dim, max_position, rotary_dim=rotary_dim)
    window, num_layers = fields.optional_count("sliding_window"), fields.count("num_hidden_layers")
    return ModelConfig(
        model_type=fields.choice("model_type", ("phi3",)),
        vocab_size=fields.count("vocab_size"),
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        tie_embeddings=fields.flag("tie_word_embeddings"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        # Phi-4-mini's window is longer than its context, so it has no effect.
        windows=(None if window is None or window >= max_position else window,) * num_layers,
        eos_token_ids=fields.eos_token_ids(),
        bos_token_id=fields.bos_token_id(),
    )
