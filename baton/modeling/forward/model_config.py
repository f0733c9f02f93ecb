"""Properties of a model that all modules may use. Properties that only its layers need are in the family's module."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """RoPE scaling, with the names of Hugging Face configs. `kind` is default, linear, llama3, yarn or longrope."""

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    factors: tuple[float, ...] = ()
    """One factor for each wavelength (longrope)."""


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder, its context and its special tokens."""

    model_type: str
    """Model type, as named in config.json."""
    vocab_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Width inside the feed-forward part. In a mixture of experts: inside one expert."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Length of the model's context in tokens."""
    tie_embeddings: bool
    rope_theta: float | None = None
    """Base of RoPE's frequencies. None: the model does not use RoPE."""
    rope_scaling: RopeScaling = RopeScaling()
    rotary_dim: int | None = None
    """Number of dimensions of a head that RoPE rotates: the first dimensions of each half. None: all dimensions."""
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer in tokens, or None for full attention."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    is_gated: bool = True
    """True if the feed-forward part has three matrices (SwiGLU), False if it has two."""
    num_experts: int = 1
    """Number of feed-forward parts of each layer. Above 1 in a mixture of experts."""
    num_active_experts: int = 1
    """Number of feed-forward parts that a token passes through in each layer."""
