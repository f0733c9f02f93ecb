"""The Falcon family (Almazrouei et al., 2023): layer norms, an MLP without a gate in parallel with the attention, few
KV heads, and RoPE.

- falcon-7b has one KV head. Attention and MLP share one norm.
- falcon-40b (`new_decoder_architecture`) has grouped KV heads. Attention and MLP have separate norms.
- falcon-rw runs the MLP after the attention.

Checkpoints store the rows of the fused QKV projection grouped by KV head.

Shape letters: N heads, G kv heads, R = N / G query heads per kv head, H head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.modeling.families.checkpoint import Checkpoint
from baton.modeling.families.family import (
    compose,
    load_ends,
    load_layer_norm,
    load_linear,
    load_parameters,
    load_plain_mlp,
)
from baton.modeling.families.fields import Fields
from baton.modeling.families.rope_fields import read_rope
from baton.modeling.forward.decoder import DecoderWeights
from baton.modeling.forward.layers import ACTIVATIONS, Layer, Parallel, Sequential
from baton.modeling.forward.linear import make_linear
from baton.modeling.forward.model_config import ModelConfig
from baton.modeling.forward.norms import LayerNorm, unchanged
from baton.modeling.forward.rope import RotaryTable

_DEFAULT_EPS = 1e-5
_DEFAULT_CONTEXT = 2048
"""Default context length in tokens if the config does not state one. Equal to the default of transformers."""


@dataclass(frozen=True)
class FalconModel:
    """A model of the Falcon family."""

    config: ModelConfig
    norm_eps: float
    bias: bool
    """True if every projection has a bias."""
    activation: str
    parallel: bool
    """True if attention and MLP read the same input. False if the MLP runs after the attention and reads its result."""
    attention_norm: str
    mlp_norm: str
    """Name of the norm before the MLP, within a layer. If it equals `attention_norm`, attention and MLP share one
    norm."""

    @classmethod
    def read(cls, fields: Fields) -> "FalconModel":
        """Read the model from config.json. Raises ModelError if a field is missing, invalid or not supported."""
        if fields.flag("alibi"):
            remedy = "choose a Falcon with rotary positions, such as falcon-7b"
            raise fields.error("alibi", "true is not supported: attention takes no bias by distance", remedy)
        parallel = fields.flag("parallel_attn", default=True)
        attention_norm, mlp_norm = _norm_names(fields, parallel)
        return cls(
            config=_read_config(fields),
            norm_eps=fields.number("layer_norm_epsilon", _DEFAULT_EPS),
            bias=fields.flag("bias"),
            activation=fields.choice("activation", ACTIVATIONS, "gelu"),
            parallel=parallel,
            attention_norm=attention_norm,
            mlp_norm=mlp_norm,
        )

    def load(self, checkpoint: Checkpoint) -> DecoderWeights:
        config = self.config
        ends = load_ends(checkpoint, config, "transformer.word_embeddings", config.hidden_size)
        return compose(
            *(self, checkpoint, ends),
            positions=RotaryTable(config, checkpoint.device, checkpoint.dtype),
            layers=[self._layer(checkpoint, f"transformer.h.{layer}") for layer in range(config.num_layers)],
            final_norm=self._norm(checkpoint, "transformer.ln_f"),
        )

    def _layer(self, checkpoint: Checkpoint, at: str) -> Layer:
        config, hidden = self.config, self.config.hidden_size
        num_rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        qkv_proj, qkv_bias = load_parameters(
            checkpoint, {f"{at}.self_attention.query_key_value": num_rows}, hidden, self.bias
        )
        norms = {name: self._norm(checkpoint, f"{at}.{name}") for name in {self.attention_norm, self.mlp_norm}}
        mlp = f"{at}.mlp.dense_h_to_4h", f"{at}.mlp.dense_4h_to_h"
        tail = Parallel if self.parallel else Sequential
        return Layer(
            attention_norm=norms[self.attention_norm],
            qkv=make_linear(
                self._ungrouped(qkv_proj),
                None if qkv_bias is None else self._ungrouped(qkv_bias),
                int8=checkpoint.int8,
            ),
            head_norm=unchanged,
            tail=tail(
                load_linear(checkpoint, {f"{at}.self_attention.dense": hidden}, hidden, self.bias),
                norms[self.mlp_norm],
                load_plain_mlp(checkpoint, mlp, config, self.activation, self.bias),
            ),
        )

    def _norm(self, checkpoint: Checkpoint, name: str) -> LayerNorm:
        return load_layer_norm(checkpoint, name, self.config.hidden_size, self.norm_eps)

    def _ungrouped(self, rows: Tensor) -> Tensor:
        """Return the rows of the fused projection in our order: all queries, all keys, all values. Checkpoints store
        them as `[G, R + 2, H]`: for each group, its queries, its key and its value. This also covers models with a
        single group or one group per head."""
        groups = rows.view(self.config.num_kv_heads, -1, self.config.head_dim, *rows.shape[1:])
        return torch.cat([part.flatten(0, 2) for part in (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])])


def _norm_names(fields: Fields, parallel: bool) -> tuple[str, str]:
    new = fields.flag("new_decoder_architecture")
    num_norms = fields.count("num_ln_in_parallel_attn", 2 if new else 1)
    if num_norms not in ((1, 2) if new else (1,)):
        raise fields.error("num_ln_in_parallel_attn", f"{num_norms} is not supported with this decoder architecture")
    if new and not parallel:
        raise fields.error("parallel_attn", "false is not supported with new_decoder_architecture")
    if num_norms == 2:
        return "ln_attn", "ln_mlp"
    return "input_layernorm", "input_layernorm" if parallel else "post_attention_layernorm"


def _read_config(fields: Fields) -> ModelConfig:
    num_heads, num_layers = fields.count("num_attention_heads"), fields.count("num_hidden_layers")
    hidden_size = fields.count("hidden_size")
    head_dim = fields.head_dim(hidden_size, num_heads)
    max_position = fields.count("max_position_embeddings", _DEFAULT_CONTEXT)
    rope_theta, rope_scaling = read_rope(fields, head_dim, max_position)
    return ModelConfig(
        model_type="falcon",
        vocab_size=fields.count("vocab_size"),
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=fields.count("ffn_hidden_size", 4 * hidden_size),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, num_heads),
        head_dim=head_dim,
        max_position=max_position,
        tie_embeddings=fields.flag("tie_word_embeddings", default=True),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        windows=(None,) * num_layers,
        eos_token_ids=fields.eos_token_ids(),
        bos_token_id=fields.bos_token_id(),
        is_gated=False,
    )


def _num_kv_heads(fields: Fields, num_heads: int) -> int:
    """Return the number of kv heads. Only the new architecture uses the field `num_kv_heads`."""
    if not fields.flag("new_decoder_architecture"):
        return 1 if fields.flag("multi_query", default=True) else num_heads
    num_kv_heads = fields.count("num_kv_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_kv_heads", f"{num_kv_heads} does not divide {num_heads} attention heads")
    return num_kv_heads
