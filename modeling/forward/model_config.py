"""Facts of a model that every part may use, whatever its family; facts that only its layers need stay in the family."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """RoPE scaling as Hugging Face configs spell it; `kind` is one of default, linear, llama3, yarn, longrope."""

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    factors: tuple[float, ...] = ()
    """Factor on each wavelength (longrope)."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape, its context and its special tokens."""

    model_type: str
    """Model type, as in config.json."""
    vocab_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Width inside the feed-forward part; inside one expert, in a mixture of experts."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Tokens of context that the model was made for."""
    tie_embeddings: bool
    rope_theta: float | None = None
    """Base of RoPE's frequencies. None when the model does not rotate."""
    rope_scaling: RopeScaling = RopeScaling()
    rotary_dim: int | None = None
    """Dimensions of a head that RoPE turns: the first ones of each half. None: all."""
    windows: tuple[int | None, ...] = ()
    """Per layer: the sliding window in tokens, or None for full attention."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    is_gated: bool = True
    """Whether the feed-forward part has three matrices (SwiGLU) or two."""
    num_experts: int = 1
    """Feed-forward parts of each layer; above 1 in a mixture of experts."""
    num_active_experts: int = 1
    """Feed-forward parts that a token passes through in each layer."""
