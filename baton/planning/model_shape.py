"""Shapes of models: the numbers of layers, heads and widths on which the time of a prefill depends.

Used by the cost model and by `baton simulate`. Does no I/O.
"""

import dataclasses
from dataclasses import dataclass

from baton.errors import ConfigError


@dataclass(frozen=True)
class ModelShape:
    """Shape of a decoder with grouped-query attention. In all FLOPs, a multiply-add counts as two operations."""

    num_layers: int
    hidden: int
    """Width of the hidden states (model dimension)."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    """Intermediate width of the feed-forward network. In a mixture of experts, the intermediate width of one expert."""
    vocab: int
    gated: bool = True
    """True if the feed-forward network has three matrices (SwiGLU). False if it has two."""
    dtype_bytes: int = 2
    """Size in bytes of one element of the weights and of KV."""
    num_experts: int = 1
    """Number of experts in each layer. 1: the model is not a mixture of experts. The weights of routers are not
    counted."""
    num_active_experts: int = 1
    """Number of experts that process each token in one layer. 1 if the model is not a mixture of experts."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "gated" and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"shape: {field.name} = {value!r} is out of range: give a whole number of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"shape: num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}"
            )
        if self.num_active_experts > self.num_experts:
            raise ConfigError(
                f"shape: num_active_experts = {self.num_active_experts} is out of range: give at most num_experts ="
                f" {self.num_experts}"
            )

    @property
    def ffn_weights(self) -> int:
        """Number of weights in the feed-forward network of one layer. In a mixture of experts, the number of weights in
        one expert."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def active_ffn(self) -> int:
        """Sum of the intermediate widths of all experts that process a token in one layer."""
        return self.ffn * self.num_active_experts

    @property
    def projection_weights(self) -> int:
        """Number of weights in the query, key and value matrices of one layer. The products with these matrices must be
        computed before the KV of the layer can be sent."""
        return self.hidden * self.head_dim * (self.num_heads + 2 * self.num_kv_heads)

    @property
    def layer_weights(self) -> int:
        """Number of weights in one layer by which a token is multiplied. Experts that do not process the token are not
        counted."""
        attention = self.projection_weights + self.hidden * self.head_dim * self.num_heads
        return attention + self.num_active_experts * self.ffn_weights

    @property
    def step_weights(self) -> int:
        """Number of weights by which each token of a step is multiplied, in all layers and the output head."""
        return self.num_layers * self.layer_weights + self.vocab * self.hidden

    def read_weights(self, num_tokens: int) -> float:
        """Return the expected number of weights that a step with `num_tokens` tokens reads. In a mixture of experts,
        each token's experts are assumed to be random: uniform, and independent of those of other tokens."""
        touched = self.num_experts * (1 - (1 - self.num_active_experts / self.num_experts) ** num_tokens)
        further = max(touched - self.num_active_experts, 0.0)
        return self.step_weights + self.num_layers * further * self.ffn_weights

    @property
    def project_share(self) -> float:
        """Fraction of a layer's matrix products that must be computed before the KV of the layer can be sent."""
        return self.projection_weights / self.layer_weights

    @property
    def linear_flops(self) -> int:
        """FLOPs of all matrix products of one token in one layer. Attention is not included."""
        return 2 * self.layer_weights

    @property
    def pair_flops(self) -> int:
        """FLOPs of attention for one (query, key) pair in one layer, summed over all heads. They consist of one score
        and one weighted value for each head."""
        return 4 * self.num_heads * self.head_dim

    @property
    def kv_bytes(self) -> int:
        """Size in bytes of one token's K and V in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes
