"""Text models of Gemma 3 (Gemma Team, 2025).

They scale the embeddings, and have norms before and after attention and MLP, and norms of queries and keys. Layers have
either a sliding window or full attention. The two kinds of layers use different RoPE settings.

Norms multiply by 1 + weight, in fp32. Gemma 3 scales scores by 1 / sqrt(`query_pre_attn_scalar`) instead of 1 /
sqrt(head dim). The ratio of the two scales is multiplied into the norm of the queries, so attention uses the same scale
for all families.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F

from baton.modeling.families.checkpoint import Checkpoint
from baton.modeling.families.family import compose, load_ends, load_linear
from baton.modeling.families.fields import Fields
from baton.modeling.families.rope_fields import read_rope
from baton.modeling.forward.decoder import DecoderWeights
from baton.modeling.forward.layers import ActivatedMlp, Layer, SandwichNorm
from baton.modeling.forward.model_config import ModelConfig, RopeScaling
from baton.modeling.forward.norms import HeadNorms, WideRmsNorm
from baton.modeling.forward.rope import LayeredRotaryTable, RotaryTable

_DEFAULT_EPS = 1e-6
_DEFAULT_HEAD_DIM = 256
_DEFAULT_CONTEXT = 131072
_DEFAULT_WINDOW = 4096
_DEFAULT_PATTERN = 6
_DEFAULT_THETA = 1e6
_DEFAULT_LOCAL_THETA = 1e4
"""Default of transformers for `rope_local_base_freq`, the base of the RoPE frequencies in layers with a sliding
window."""
_ACTIVATION = "gelu_pytorch_tanh"
_REFUSED = {
    "attn_logit_softcapping": "choose a Gemma 3, which has none",
    "final_logit_softcapping": "choose a Gemma 3, which has none",
    "use_bidirectional_attention": "choose a model that generates",
}


@dataclass(frozen=True)
class Gemma3Model:
    """A text model of the Gemma 3 family."""

    config: ModelConfig
    norm_eps: float
    attention_bias: bool
    """True if the attention's projections have biases."""
    query_scale: float
    """Factor on the queries, in addition to the usual scale 1 / sqrt(head dim)."""
    local_theta: float
    """Base of the RoPE frequencies in layers with a sliding window."""

    @classmethod
    def read(cls, fields: Fields) -> "Gemma3Model":
        """Read the model from config.json. Raises ModelError if a field is missing, invalid or not supported."""
        for name, remedy in _REFUSED.items():
            fields.refuse(name, remedy)
        config, local_theta = _read_config(fields)
        scalar = fields.number("query_pre_attn_scalar", _DEFAULT_HEAD_DIM)
        return cls(
            config,
            norm_eps=fields.number("rms_norm_eps", _DEFAULT_EPS),
            attention_bias=fields.flag("attention_bias"),
            query_scale=math.sqrt(config.head_dim / scalar),
            local_theta=local_theta,
        )

    def load(self, checkpoint: Checkpoint) -> DecoderWeights:
        config = self.config
        ends = load_ends(checkpoint, config, "model.embed_tokens", config.hidden_size)
        local = dataclasses.replace(config, rope_theta=self.local_theta, rope_scaling=RopeScaling())
        tables = tuple(RotaryTable(each, checkpoint.device, checkpoint.dtype) for each in (config, local))
        return compose(
            *(self, checkpoint, ends),
            positions=LayeredRotaryTable(tables, tuple(int(window is not None) for window in config.windows)),
            layers=[self._layer(checkpoint, f"model.layers.{layer}") for layer in range(config.num_layers)],
            final_norm=self._norm(checkpoint, "model.norm"),
            embedding_scale=math.sqrt(config.hidden_size),
        )

    def _layer(self, checkpoint: Checkpoint, at: str) -> Layer:
        config, hidden, head_dim = self.config, self.config.hidden_size, self.config.head_dim
        width, kv_width = config.num_heads * head_dim, config.num_kv_heads * head_dim
        qkv = {f"{at}.self_attn.{name}_proj": rows for name, rows in (("q", width), ("k", kv_width), ("v", kv_width))}
        q_norm = self._norm(checkpoint, f"{at}.self_attn.q_norm", head_dim)
        return Layer(
            attention_norm=self._norm(checkpoint, f"{at}.input_layernorm"),
            qkv=load_linear(checkpoint, qkv, hidden, self.attention_bias),
            head_norm=HeadNorms(
                WideRmsNorm(q_norm.gain_D * self.query_scale, self.norm_eps),
                self._norm(checkpoint, f"{at}.self_attn.k_norm", head_dim),
                config.num_heads,
            ),
            tail=SandwichNorm(
                load_linear(checkpoint, {f"{at}.self_attn.o_proj": hidden}, width, self.attention_bias),
                self._norm(checkpoint, f"{at}.post_attention_layernorm"),
                self._norm(checkpoint, f"{at}.pre_feedforward_layernorm"),
                self._mlp(checkpoint, f"{at}.mlp"),
                self._norm(checkpoint, f"{at}.post_feedforward_layernorm"),
            ),
        )

    def _mlp(self, checkpoint: Checkpoint, at: str) -> ActivatedMlp:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        return ActivatedMlp(
            load_linear(checkpoint, {f"{at}.gate_proj": inner, f"{at}.up_proj": inner}, hidden, bias=False),
            functools.partial(F.gelu, approximate="tanh"),
            load_linear(checkpoint, {f"{at}.down_proj": hidden}, inner, bias=False),
        )

    def _norm(self, checkpoint: Checkpoint, name: str, size: int | None = None) -> WideRmsNorm:
        gain_D = checkpoint.take(f"{name}.weight", (size or self.config.hidden_size,)).float()
        return WideRmsNorm(1.0 + gain_D, self.norm_eps)


def _read_config(fields: Fields) -> tuple[ModelConfig, float]:
    """Return the config and the base of RoPE in layers with a window. The RoPE of the config is that of layers without
    a window."""
    fields.choice("hidden_activation", (_ACTIVATION,), _ACTIVATION)
    num_heads, num_layers = fields.count("num_attention_heads"), fields.count("num_hidden_layers")
    num_kv_heads = fields.count("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} attention heads")
    head_dim = fields.count("head_dim", _DEFAULT_HEAD_DIM)
    max_position = fields.count("max_position_embeddings", _DEFAULT_CONTEXT)
    rope_theta, rope_scaling = read_rope(_rope_of(fields, "full_attention"), head_dim, max_position)
    local_theta, local_scaling = read_rope(_rope_of(fields, "sliding_attention"), head_dim, max_position)
    if local_scaling.kind != "default":
        remedy = "choose a model that scales the RoPE of full layers only"
        raise fields.error("rope_parameters", f"{local_scaling.kind!r} of sliding_attention is not supported", remedy)
    config = ModelConfig(
        model_type="gemma3_text",
        vocab_size=fields.count("vocab_size"),
        num_layers=num_layers,
        hidden_size=fields.count("hidden_size"),
        intermediate_size=fields.count("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        tie_embeddings=fields.flag("tie_word_embeddings", default=True),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        windows=_windows(fields, num_layers),
        eos_token_ids=fields.eos_token_ids(),
        bos_token_id=fields.bos_token_id(),
    )
    return config, local_theta


def _rope_of(fields: Fields, kind: str) -> Fields:
    """Return the fields of RoPE for layers of one kind, in the form of a config in which all layers have
    the same RoPE."""
    by_kind = fields.raw.get("rope_parameters") or {}
    if not isinstance(by_kind, Mapping) or not all(isinstance(each, Mapping) for each in by_kind.values()):
        raise fields.error("rope_parameters", "are not those of full_attention and sliding_attention")
    parameters = dict(by_kind.get(kind) or {})
    if kind == "sliding_attention":
        theta = fields.number("rope_local_base_freq", _DEFAULT_LOCAL_THETA)
    else:
        theta = fields.number("rope_theta", _DEFAULT_THETA)
        scaling = fields.raw.get("rope_scaling") or {}
        if not isinstance(scaling, Mapping):
            raise fields.error("rope_scaling", f"{scaling!r} is not a set of parameters")
        parameters |= scaling
    return Fields({"rope_theta": theta, "rope_parameters": parameters}, f"{fields.source}: {kind}")


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer. If the config does not name the kinds of layers, every sixth layer has no
    window."""
    window = fields.count("sliding_window", _DEFAULT_WINDOW)
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        pattern = fields.count("sliding_window_pattern", _DEFAULT_PATTERN)
        return tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.error("layer_types", f"does not list {num_layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.error("layer_types", f"{kind!r} is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
