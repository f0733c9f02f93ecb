"""How many bytes a model's weights have, and how many of them a step reads."""

from collections.abc import Callable
from dataclasses import is_dataclass

from torch import Tensor

from modeling.forward.decoder import DecoderWeights
from modeling.forward.linear import Linear, LinearByRows


def bytes_per_step(weights: DecoderWeights) -> int:
    """Return the bytes of the parameters that every step of few rows reads whole. Not counted are positions and an
    embedding that is not the head: such a step reads only some of their rows."""
    return sum(_bytes_by_part((weights.layers, weights.final_norm, weights.head), _bytes_read).values())


def weight_bytes(weights: DecoderWeights) -> int:
    """Return the bytes of all parameters, as they are kept."""
    return sum(_bytes_by_part(weights, lambda linear: linear.num_bytes).values())


def _bytes_read(linear: Linear) -> int:
    """Return the bytes that a linear layer reads for few rows: of a weight that is kept twice, one copy."""
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
