"""Computes the number of bytes of a model's weights, and of the weights that one step reads."""

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass

from torch import Tensor

from baton.modeling.forward.decoder import DecoderWeights
from baton.modeling.forward.experts import mixtures
from baton.modeling.forward.linear import Linear, LinearByRows


@dataclass(frozen=True)
class StepBytes:
    """Number of bytes of parameters that a step with few tokens reads. In a mixture of experts, this depends on the
    number of tokens."""

    always: int
    """Number of bytes that every step reads."""
    experts: int = 0
    """Number of bytes of all experts of all layers. 0: the model is not a mixture of experts."""
    active_share: float = 1.0
    """Fraction of a layer's experts that process one token."""

    def of(self, num_tokens: int) -> int:
        """Return the number of bytes that a step of `num_tokens` tokens reads. For a mixture of experts, this is the
        expected number, assuming that the experts of each token are drawn uniformly and independently."""
        return self.always + round(self.experts * (1 - (1 - self.active_share) ** num_tokens))


def step_reads(weights: DecoderWeights) -> StepBytes:
    """Return the number of bytes of parameters that steps with few tokens read. Tables of which a step
    reads only some rows are not counted. These are position tables, and an embedding that does not share its weight
    with the output head."""
    read = (weights.layers, weights.final_norm, weights.head)
    num_bytes = sum(_bytes_by_part(read, _bytes_read).values())
    found = mixtures(weights.layers)
    if not found:
        return StepBytes(num_bytes)
    experts = sum(_bytes_by_part([each.products for each in found], _bytes_read).values())
    return StepBytes(num_bytes - experts, experts, found[0].num_active / found[0].products.num_experts)


def bytes_per_step(weights: DecoderWeights, num_tokens: int = 1) -> int:
    """Return the number of bytes of parameters that a step with `num_tokens` tokens reads. The number is valid for
    steps with few tokens, which read each linear layer's weight once."""
    return step_reads(weights).of(num_tokens)


def weight_bytes(weights: DecoderWeights) -> int:
    """Return the number of bytes of all parameters as they are stored."""
    return sum(_bytes_by_part(weights, lambda linear: linear.num_bytes).values())


def _bytes_read(linear: Linear) -> int:
    """Return the number of bytes that a linear layer reads for few rows. If a weight is stored twice,
    one copy counts."""
    return linear.few.num_bytes if isinstance(linear, LinearByRows) else linear.num_bytes


def _bytes_by_part(part: object, bytes_of: Callable[[Linear], int]) -> dict[int, int]:
    """Return the bytes of each linear layer, by `bytes_of`, and of each other tensor within `part`, by object id. An
    object that is used twice, such as a tied embedding, counts once."""
    if isinstance(part, Linear):
        return {id(part): bytes_of(part)}
    if isinstance(part, Tensor):
        return {id(part): part.nbytes}
    if isinstance(part, tuple | list):
        children = list(part)
    else:
        attributes = getattr(part, "__dict__", {}).values()
        children = [each for each in attributes if is_dataclass(part) or isinstance(each, Tensor)]
    found: dict[int, int] = {}
    for child in children:
        found |= _bytes_by_part(child, bytes_of)
    return found
