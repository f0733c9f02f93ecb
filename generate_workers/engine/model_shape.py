"""Conversion of a ModelConfig to the ModelShape from which FLOPs and bytes are computed. Pure."""

from baton.modeling.forward.model_config import ModelConfig
from baton.planning.model_shape import ModelShape


def model_shape(config: ModelConfig, dtype_bytes: int) -> ModelShape:
    """Return the shape of a model whose weights and KV have elements of `dtype_bytes` bytes."""
    return ModelShape(
        num_layers=config.num_layers,
        hidden=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        gated=config.is_gated,
        dtype_bytes=dtype_bytes,
        num_experts=config.num_experts,
        num_active_experts=config.num_active_experts,
    )
