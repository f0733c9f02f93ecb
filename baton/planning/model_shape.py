"""Shapes of models: the numbers of layers, heads and widths on which the time of a prefill depends.

Used by the cost model and by `baton simulate`. Pure.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from baton.errors import ConfigError


@dataclass(frozen=True)
class ModelShape:
    """The shape of a decoder with grouped-query attention. FLOPs count a multiply-add as two."""

    num_layers: int
    hidden: int
    """Width of the hidden states."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    """Width inside the feed-forward part; inside one expert, in a mixture of experts."""
    vocab: int
    gated: bool = True
    """True if the feed-forward part has three matrices (SwiGLU), False if it has two."""
    dtype_bytes: int = 2
    """Bytes of one element of weights and KV."""
    num_experts: int = 1
    """Number of feed-forward parts of each layer. Above 1 in a mixture of experts; the weights of its routers are
    ignored."""
    num_active_experts: int = 1
    """Number of feed-forward parts that a token passes through in each layer."""

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
    def identity(self) -> dict[str, Any]:
        """Fields that identify this shape. For a model without experts, the fields of experts are left out. So
        fingerprints in files from before these fields existed remain valid."""
        fields = dataclasses.asdict(self)
        return fields if self.num_experts > 1 else {name: fields[name] for name in fields if "experts" not in name}

    @property
    def ffn_weights(self) -> int:
        """Number of weights in a layer's feed-forward part; in a mixture of experts, in one expert."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def active_ffn(self) -> int:
        """Sum of the widths of all feed-forward parts that a token passes through in a layer."""
        return self.ffn * self.num_active_experts

    @property
    def projection_weights(self) -> int:
        """Number of weights in a layer's query, key and value matrices. These products must be computed before the
        layer's KV can be sent."""
        return self.hidden * self.head_dim * (self.num_heads + 2 * self.num_kv_heads)

    @property
    def layer_weights(self) -> int:
        """Number of weights in the matrices of one layer with which a token is multiplied. Experts that the token does
        not use are not counted."""
        attention = self.projection_weights + self.hidden * self.head_dim * self.num_heads
        return attention + self.num_active_experts * self.ffn_weights

    @property
    def step_weights(self) -> int:
        """Number of weights in all layers and the output head with which a step multiplies each token."""
        return self.num_layers * self.layer_weights + self.vocab * self.hidden

    def read_weights(self, num_tokens: int) -> float:
        """Return the number of weights that a step of `num_tokens` tokens reads. In a mixture of experts, the mean for
        tokens whose experts are drawn uniformly and independently."""
        touched = self.num_experts * (1 - (1 - self.num_active_experts / self.num_experts) ** num_tokens)
        further = max(touched - self.num_active_experts, 0.0)
        return self.step_weights + self.num_layers * further * self.ffn_weights

    @property
    def project_share(self) -> float:
        """Fraction of a layer's linear work that must be done before its KV can be sent."""
        return self.projection_weights / self.layer_weights

    @property
    def linear_flops(self) -> int:
        """FLOPs of one token in one layer, without attention."""
        return 2 * self.layer_weights

    @property
    def pair_flops(self) -> int:
        """FLOPs of one query-key pair in one layer, over all heads: a score and a weighted value."""
        return 4 * self.num_heads * self.head_dim

    @property
    def head_flops(self) -> int:
        """FLOPs of one token's logits."""
        return 2 * self.hidden * self.vocab

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's K and V in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes


def shape_from(fields: dict[str, Any], where: str) -> ModelShape:
    """Make a shape from its fields by name. Raises ConfigError, which contains `where`, for missing or
    unknown fields."""
    known = {field.name: field for field in dataclasses.fields(ModelShape)}
    required = [name for name, field in known.items() if field.default is dataclasses.MISSING]
    if unknown := sorted(set(fields) - set(known)):
        raise ConfigError(f"{where}: {unknown[0]} is not a field of a shape: use {', '.join(known)}")
    if missing := [name for name in required if name not in fields]:
        raise ConfigError(f"{where}: {missing[0]} is missing: a shape needs {', '.join(required)}")
    return ModelShape(**fields)
