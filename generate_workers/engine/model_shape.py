"""Converts a ModelConfig to a ModelShape, from which FLOPs and bytes are computed. The function has no side effects."""

from baton.modeling.forward.model_config import ModelConfig
from baton.planning.model_shape import ModelShape


def model_shape(config: ModelConfig, dtype_bytes: int) -> ModelShape:
    """Return the ModelShape of a model. `dtype_bytes` is the number of bytes of one value in weights and KV."""
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
