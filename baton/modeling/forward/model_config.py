"""Properties of a model that all modules may use. Properties that only the model's layers use are defined in the module
of the family."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """RoPE scaling. The fields are named as in Hugging Face configs. `kind` is default, linear, llama3, yarn or
    longrope."""

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    factors: tuple[float, ...] = ()
    """Factor on each wavelength. Used by longrope only."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder, its context length and its special tokens."""

    model_type: str
    """Value of `model_type` in config.json."""
    vocab_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Width inside the feed-forward part of a layer. In a mixture of experts, the width inside one expert."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Maximum length of a sequence in tokens (the context length)."""
    tie_embeddings: bool
    rope_theta: float | None = None
    """Base of RoPE's frequencies. None: the model does not use RoPE."""
    rope_scaling: RopeScaling = RopeScaling()
    rotary_dim: int | None = None
    """Number of dimensions of a head that RoPE rotates. These are the first dimensions of each half of the head. None:
    all dimensions are rotated."""
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer in tokens. None for a layer with full attention."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    is_gated: bool = True
    """True if the feed-forward part is gated (SwiGLU) and has three matrices. False if it has two matrices."""
    num_experts: int = 1
    """Number of experts of each layer. 1: the model is not a mixture of experts."""
    num_active_experts: int = 1
    """Number of experts that process each token in each layer."""
