"""Shapes of known models, and shapes that are made from fields. Errors name the field or list the known models."""

from typing import Any

import pytest

from baton.errors import ConfigError
from baton.planning.model_shape import ModelShape
from baton_lab.study.known_models import SHAPES, TIED, shape_from, shape_of

FIELDS = {
    "num_layers": 2, "hidden": 8, "num_heads": 4, "num_kv_heads": 2, "head_dim": 2, "ffn": 16, "vocab": 100,
}  # fmt: skip
MIXTURE = {**FIELDS, "num_experts": 8, "num_active_experts": 2}


def test_shape_from_fields() -> None:
    assert shape_from(FIELDS, "here") == ModelShape(2, 8, 4, 2, 2, 16, 100)
    assert not shape_from({**FIELDS, "gated": False}, "here").gated
    mixture = shape_from(MIXTURE, "here")
    assert (mixture.num_experts, mixture.num_active_experts) == (8, 2)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ffn": None}, "here: ffn is missing"),
        ({"depth": 3}, "here: depth is not a field"),
        ({"hidden": 0}, "hidden = 0"),
        ({"num_heads": 3}, "num_heads = 3 is not a multiple"),
        ({"num_active_experts": 9}, "num_active_experts = 9 is out of range: give at most num_experts = 8"),
    ],
)
def test_wrong_shapes_name_the_field(change: dict[str, Any], text: str) -> None:
    fields = {name: value for name, value in {**MIXTURE, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=text):
        shape_from(fields, "here")


def test_known_models_are_found_by_name_and_unknown_ones_list_them() -> None:
    assert all(shape_of(name) is shape for name, shape in SHAPES.items())
    assert SHAPES.keys() >= TIED
    with pytest.raises(ConfigError, match=", ".join(SHAPES)):
        shape_of("gpt-5")
