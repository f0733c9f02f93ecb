"""Reads the RoPE settings of a config.json, in the formats of transformers 4 and 5.

The families' `read` methods use it when a model is loaded.
"""

import math
from collections.abc import Mapping

from baton.modeling.families.fields import Fields
from baton.modeling.forward.model_config import RopeScaling

_DEFAULT_THETA = 10000.0
"""Default of transformers for `rope_theta`."""
_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
_PARTIAL = "partial_rotary_factor"


def rope_parameters(fields: Fields) -> tuple[str, Mapping[str, object]]:
    """Return the name and the value of the field with RoPE's parameters: `rope_scaling`, or `rope_parameters` in
    transformers 5. Raises ModelError if the parameters differ between layers."""
    name = "rope_scaling" if fields.raw.get("rope_scaling") else "rope_parameters"
    parameters = fields.raw.get(name) or {}
    if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
        raise fields.error(name, "is not one set of parameters for all layers", "choose another model")
    return name, parameters


def read_rope(
    fields: Fields, head_dim: int, max_position: int, *, rotary_dim: int | None = None
) -> tuple[float, RopeScaling]:
    """Return RoPE's base and scaling. `rotary_dim` is the number of rotated dimensions of each head. None: all
    `head_dim` dimensions are rotated, and a config that rotates only some of them is rejected. Raises ModelError if the
    scaling is not supported."""
    if head_dim % 2:
        raise fields.error("head_dim", f"{head_dim} is odd, and RoPE turns pairs of dimensions")
    name, parameters = rope_parameters(fields)
    rope = Fields(parameters, f"{fields.source}: {name}")
    theta = rope.number("rope_theta", fields.number("rope_theta", _DEFAULT_THETA))
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in _KINDS:
        remedy = f"choose a model with {', '.join(_KINDS[:-1])} or {_KINDS[-1]} RoPE"
        raise fields.error(name, f"rope_type {kind!r} is not supported", remedy)
    for partial in (fields, rope):
        if rotary_dim is None and partial.number(_PARTIAL, 1.0) != 1.0:
            raise partial.error(_PARTIAL, "is not supported", "choose a model that rotates whole heads")
    if kind == "default":
        return theta, RopeScaling()
    original = rope.count("original_max_position_embeddings", max_position)
    original = fields.count("original_max_position_embeddings", original)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise rope.error("low_freq_factor", f"{low} is not below high_freq_factor {high}")
        return theta, RopeScaling(kind, rope.number("factor"), low, high, original_max_position=original)
    if kind == "linear":
        return theta, RopeScaling(kind, rope.number("factor"))
    if kind == "longrope":
        return theta, _longrope(rope, rotary_dim or head_dim, max_position, original)
    return theta, _yarn(rope, original)


def read_rotary_dim(fields: Fields, head_dim: int) -> int:
    """Return the number of dimensions of a head that RoPE rotates, from the field `partial_rotary_factor`. Raises
    ModelError if the number is 0, odd or above `head_dim`."""
    _, parameters = rope_parameters(fields)
    holder = Fields(parameters, fields.source) if parameters.get(_PARTIAL) is not None else fields
    share = holder.number(_PARTIAL, 1.0)
    rotary_dim = int(head_dim * share)
    if share > 1 or rotary_dim % 2 or not rotary_dim:
        raise holder.error(_PARTIAL, f"{share} of {head_dim} dimensions is not an even number of them")
    return rotary_dim


def _yarn(rope: Fields, original_max_position: int) -> RopeScaling:
    if rope.raw.get("truncate") is False:
        raise rope.error("truncate", "false is not supported", "choose a model without it")
    factor = rope.number("factor")
    attention_factor = None
    if rope.raw.get("attention_factor") is not None:
        attention_factor = rope.number("attention_factor")
    elif rope.raw.get("mscale") and rope.raw.get("mscale_all_dim") and factor > 1:
        log = 0.1 * math.log(factor)
        attention_factor = (rope.number("mscale") * log + 1) / (rope.number("mscale_all_dim") * log + 1)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=original_max_position,
        attention_factor=attention_factor,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
    )


def _longrope(rope: Fields, rotary_dim: int, max_position: int, original_max_position: int) -> RopeScaling:
    """Read LongRoPE. The long factors are used if the model's context is longer than the one with which it was first
    trained, else the short factors. The choice does not depend on a sequence's length, unlike that of transformers. If
    it did, a sequence's keys would have to be recomputed when it exceeds the shorter context, and short and long
    sequences could not share keys."""
    for name in ("short_mscale", "long_mscale"):
        rope.refuse(name, "choose a model without it")
    name = "long_factor" if max_position > original_max_position else "short_factor"
    factors = rope.raw.get(name)
    if not isinstance(factors, list) or len(factors) != rotary_dim // 2 or not all(map(_is_factor, factors)):
        raise rope.error(name, f"is not a list of {rotary_dim // 2} numbers above 0, one for each pair of dimensions")
    attention_factor = None if rope.raw.get("attention_factor") is None else rope.number("attention_factor")
    return RopeScaling(
        kind="longrope",
        factor=rope.number("factor", max_position / original_max_position),
        original_max_position=original_max_position,
        attention_factor=attention_factor,
        factors=tuple(map(float, factors)),
    )


def _is_factor(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
