"""The Llama family: Llama, Mistral, Qwen2 and Qwen3. RMSNorm before the attention and before a gated MLP, and RoPE.

The models of `phi3` and `qwen3_moe` are derived from this family's model.
"""

from dataclasses import dataclass

from baton.modeling.families.checkpoint import Checkpoint
from baton.modeling.families.family import compose, load_ends, load_linear
from baton.modeling.families.fields import Fields
from baton.modeling.families.rope_fields import read_rope
from baton.modeling.forward.decoder import DecoderWeights
from baton.modeling.forward.layers import GatedMlp, Layer, Mlp, Sequential
from baton.modeling.forward.linear import Linear
from baton.modeling.forward.model_config import ModelConfig
from baton.modeling.forward.norms import HeadNorms, RmsNorm, unchanged
from baton.modeling.forward.rope import RotaryTable

_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_HEAD_NORMS = ("qwen3", "qwen3_moe")
"""Model types that apply norms to queries and keys."""
_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28
"""Default of transformers for `max_window_layers`."""


@dataclass(frozen=True)
class LlamaModel:
    """A model of the Llama family."""

    config: ModelConfig
    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    """True if the attention's output projection has a bias."""
    mlp_bias: bool
    qk_norm: bool
    """True if each head of queries and keys has an RMSNorm before RoPE (Qwen3)."""

    @classmethod
    def read(cls, fields: Fields) -> "LlamaModel":
        """Read the model from config.json. Raises ModelError if a field is missing, invalid or not supported."""
        config = read_config(fields, _MODEL_TYPES)
        attention_bias = config.model_type in ("llama", *_HEAD_NORMS) and fields.flag("attention_bias")
        return cls(
            config,
            norm_eps=fields.number("rms_norm_eps"),
            qkv_bias=attention_bias or config.model_type == "qwen2",
            output_bias=attention_bias,
            mlp_bias=config.model_type == "llama" and fields.flag("mlp_bias"),
            qk_norm=config.model_type in _HEAD_NORMS,
        )

    def load(self, checkpoint: Checkpoint) -> DecoderWeights:
        config = self.config
        ends = load_ends(checkpoint, config, "model.embed_tokens", config.hidden_size)
        return compose(
            *(self, checkpoint, ends),
            positions=RotaryTable(config, checkpoint.device, checkpoint.dtype),
            layers=[self._layer(checkpoint, f"model.layers.{layer}") for layer in range(config.num_layers)],
            final_norm=self._norm(checkpoint, "model.norm", config.hidden_size),
        )

    def _layer(self, checkpoint: Checkpoint, at: str) -> Layer:
        config = self.config
        hidden, head_dim = config.hidden_size, config.head_dim
        head_norm = (
            unchanged
            if not self.qk_norm
            else HeadNorms(
                self._norm(checkpoint, f"{at}.self_attn.q_norm", head_dim),
                self._norm(checkpoint, f"{at}.self_attn.k_norm", head_dim),
                config.num_heads,
            )
        )
        return Layer(
            attention_norm=self._norm(checkpoint, f"{at}.input_layernorm", hidden),
            qkv=self._qkv(checkpoint, f"{at}.self_attn"),
            head_norm=head_norm,
            tail=Sequential(
                self._output(checkpoint, f"{at}.self_attn.o_proj"),
                self._norm(checkpoint, f"{at}.post_attention_layernorm", hidden),
                self._mlp(checkpoint, f"{at}.mlp"),
            ),
        )

    def _qkv(self, checkpoint: Checkpoint, at: str) -> Linear:
        """Load the fused projection for queries, keys and values of the attention with the tensor prefix `at`."""
        config = self.config
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        rows = {f"{at}.{name}_proj": rows for name, rows in (("q", width), ("k", kv_width), ("v", kv_width))}
        return load_linear(checkpoint, rows, config.hidden_size, self.qkv_bias)

    def _output(self, checkpoint: Checkpoint, name: str) -> Linear:
        width = self.config.num_heads * self.config.head_dim
        return load_linear(checkpoint, {name: self.config.hidden_size}, width, self.output_bias)

    def _mlp(self, checkpoint: Checkpoint, at: str) -> Mlp:
        """Load the feed-forward part with the tensor prefix `at`."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        gate_up = {f"{at}.gate_proj": inner, f"{at}.up_proj": inner}
        return GatedMlp(
            load_linear(checkpoint, gate_up, hidden, self.mlp_bias, gated=True),
            load_linear(checkpoint, {f"{at}.down_proj": hidden}, inner, self.mlp_bias),
        )

    def _norm(self, checkpoint: Checkpoint, name: str, size: int) -> RmsNorm:
        return RmsNorm(checkpoint.take(f"{name}.weight", (size,)), self.norm_eps)


def read_config(fields: Fields, model_types: tuple[str, ...]) -> ModelConfig:
    """Read the config of a model that uses the fields of the Llama family. `model_types` lists the types that the
    caller supports."""
    model_type = fields.choice("model_type", model_types)
    fields.choice("hidden_act", ("silu",), "silu")
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads if model_type == "llama" else None)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} attention heads")
    hidden_size, max_position = fields.count("hidden_size"), fields.count("max_position_embeddings")
    head_dim = fields.count("head_dim", 128 if model_type == "qwen3" else hidden_size // num_heads)
    num_layers = fields.count("num_hidden_layers")
    rope_theta, rope_scaling = read_rope(fields, head_dim, max_position)
    return ModelConfig(
        model_type=model_type,
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
        windows=_windows(fields, model_type, num_layers),
        eos_token_ids=fields.eos_token_ids(),
        bos_token_id=fields.bos_token_id(),
    )


def _windows(fields: Fields, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    if model_type == "mistral":  # if absent it is 4096; null means full attention
        absent = "sliding_window" not in fields.raw
        window = _DEFAULT_WINDOW if absent else fields.optional_count("sliding_window")
        return (window,) * num_layers
    if model_type == "llama":
        return (None,) * num_layers
    window = fields.count("sliding_window", _DEFAULT_WINDOW) if fields.flag("use_sliding_window") else None
    if model_type == "qwen3_moe":
        return (window,) * num_layers
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        first = fields.raw.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise fields.error("max_window_layers", f"{first!r} is not a whole number from 0")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.error("layer_types", f"does not list {num_layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention") or (kind == "sliding_attention" and window is None):
            raise fields.error("layer_types", f"{kind!r} is not supported with these window settings")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
