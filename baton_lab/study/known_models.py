"""Published shapes of models, and the names of the models whose output head shares its weights with the token
embedding."""

import dataclasses
from typing import Any

from baton.errors import ConfigError
from baton.planning.model_shape import ModelShape

_LLAMA_7B = ModelShape(32, 4096, 32, 32, 128, ffn=11008, vocab=32000)


SHAPES = {
    "llama-7b": _LLAMA_7B,
    "llama-7b-gqa8": dataclasses.replace(_LLAMA_7B, num_kv_heads=8),
    "llama-7b-mqa": dataclasses.replace(_LLAMA_7B, num_kv_heads=1),
    "llama-13b": ModelShape(40, 5120, 40, 40, 128, ffn=13824, vocab=32000),
    "llama-30b": ModelShape(60, 6656, 52, 52, 128, ffn=17920, vocab=32000),
    "falcon-1b": ModelShape(24, 2048, 32, 32, 64, ffn=8192, vocab=50304, gated=False),
    "falcon-7b": ModelShape(32, 4544, 71, 1, 64, ffn=18176, vocab=65024, gated=False),
    "llama-3.1-8b": ModelShape(32, 4096, 32, 8, 128, ffn=14336, vocab=128256),
    "smollm2-135m": ModelShape(30, 576, 9, 3, 64, ffn=1536, vocab=49152),
}
"""Shapes of published models by name. The variants -gqa8 and -mqa are from table 2 of the KV-Runahead paper."""


TIED = frozenset({"falcon-1b", "falcon-7b", "smollm2-135m"})
"""Names of the models in SHAPES whose output head has the same weights as the token embedding."""


def shape_of(name: str) -> ModelShape:
    """Return the shape of the model called `name` in SHAPES. Raises ConfigError for an unknown name."""
    if name not in SHAPES:
        raise ConfigError(f"model = {name!r} is unknown: use one of {', '.join(SHAPES)}, or give its shape")
    return SHAPES[name]


def shape_from(fields: dict[str, Any], where: str) -> ModelShape:
    """Create a shape from a mapping of field names to values. `where` is named in error messages. Raises ConfigError
    for missing or unknown fields."""
    known = {field.name: field for field in dataclasses.fields(ModelShape)}
    required = [name for name, field in known.items() if field.default is dataclasses.MISSING]
    if unknown := sorted(set(fields) - set(known)):
        raise ConfigError(f"{where}: {unknown[0]} is not a field of a shape: use {', '.join(known)}")
    if missing := [name for name in required if name not in fields]:
        raise ConfigError(f"{where}: {missing[0]} is missing: a shape needs {', '.join(required)}")
    return ModelShape(**fields)
