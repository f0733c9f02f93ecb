"""A config.json's fields, read with their types checked, and fields that several families spell alike.

Each family's `read` uses it when a model is loaded.
"""

import math
from collections.abc import Iterable, Mapping

from baton.errors import ModelError
from modeling.forward.model_config import RopeScaling

_DEFAULT_THETA = 10000.0
"""transformers' value for a field that a config may leave out."""


class Fields:
    """The fields of config.json, null counting as absent; `generation` is generation_config.json, if there.

    `source` names the file in errors, which are ModelErrors of one line: file, field, problem, remedy.
    """

    def __init__(self, raw: Mapping[str, object], source: str, generation: Mapping[str, object] | None = None) -> None:
        self.raw = raw
        self.source = source
        self._generation = generation or {}

    def error(self, field: str, problem: str, remedy: str = "correct the file, or choose another model") -> ModelError:
        return ModelError(f"{self.source}: {field}: {problem}; {remedy}")

    def number(self, field: str, default: float | None = None) -> float:
        """Return a number above 0. Raises ModelError for any other value, or none without a default."""
        value = self._get(field, default)
        if value is None:
            raise self.error(field, "is missing", "add it, or download the model again")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(field, f"{value!r} is not a number above 0")
        return float(value)

    def count(self, field: str, default: int | None = None) -> int:
        """Return a whole number above 0. Raises ModelError for any other value, or none without a default."""
        value = self.number(field, default)
        if not value.is_integer():
            raise self.error(field, f"{value!r} is not a whole number")
        return int(value)

    def optional_count(self, field: str) -> int | None:
        return None if self.raw.get(field) is None else self.count(field)

    def flag(self, field: str, default: bool = False) -> bool:
        value = self._get(field, default)
        if not isinstance(value, bool):
            raise self.error(field, f"{value!r} is neither true nor false")
        return value

    def choice(self, field: str, known: Iterable[str], default: str | None = None) -> str:
        """Return one of the texts in `known`. Raises ModelError for any other value."""
        value = self._get(field, default)
        if not isinstance(value, str) or value not in known:
            raise self.error(field, f"{value!r} is not supported", f"choose a model that uses {' or '.join(known)}")
        return value

    def _get(self, field: str, default: object) -> object:
        value = self.raw.get(field)
        return default if value is None else value

    def head_dim(self, hidden_size: int, num_heads: int) -> int:
        """Return the dimensions of a head where heads divide the hidden size among them."""
        if hidden_size % num_heads:
            raise self.error("num_attention_heads", f"{num_heads} does not divide hidden_size {hidden_size}")
        return hidden_size // num_heads

    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the end-of-sequence ids; those of generation_config.json win."""
        value = self._generation.get("eos_token_id")
        if value is None:
            value = self.raw.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0 for token_id in ids):
            raise self.error("eos_token_id", f"{value!r} is neither a token id nor a list of token ids")
        return tuple(ids)

    def bos_token_id(self) -> int | None:
        value = self.raw.get("bos_token_id")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self.error("bos_token_id", f"{value!r} is not a token id")
        return value


def read_rope(fields: Fields, head_dim: int, max_position: int) -> tuple[float, RopeScaling]:
    """Return RoPE's base and scaling for heads of `head_dim`, from `rope_scaling` and `rope_theta` or from transformers
    5's `rope_parameters`. Raises ModelError for a scaling that is not supported."""
    if head_dim % 2:
        raise fields.error("head_dim", f"{head_dim} is odd, and RoPE turns pairs of dimensions")
    name = "rope_scaling" if fields.raw.get("rope_scaling") else "rope_parameters"
    parameters = fields.raw.get(name) or {}
    if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
        raise fields.error(name, "is not one set of parameters for all layers", "choose another model")
    rope = Fields(parameters, f"{fields.source}: {name}")
    theta = rope.number("rope_theta", fields.number("rope_theta", _DEFAULT_THETA))
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        remedy = "choose a model with default, linear, llama3 or yarn RoPE"
        raise fields.error(name, f"rope_type {kind!r} is not supported", remedy)
    for partial in (fields, rope):
        if partial.number("partial_rotary_factor", 1.0) != 1.0:
            raise partial.error("partial_rotary_factor", "is not supported", "choose a model that rotates whole heads")
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
    return theta, _yarn(rope, original)


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
