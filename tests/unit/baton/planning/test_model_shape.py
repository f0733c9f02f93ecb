"""Shapes: sizes that are known from the models themselves, and errors that name the field."""

from typing import Any

import pytest

from baton.errors import ConfigError
from baton.planning.model_shape import ModelShape, shape_from
from baton_lab.study.known_models import SHAPES, TIED, shape_of

FIELDS = {
    "num_layers": 2, "hidden": 8, "num_heads": 4, "num_kv_heads": 2, "head_dim": 2, "ffn": 16, "vocab": 100,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "billions"),
    {"llama-7b": 6.7, "llama-13b": 13.0, "llama-30b": 32.5, "falcon-1b": 1.3, "falcon-7b": 6.9}.items(),
)
def test_weights_add_up_to_the_model(name: str, billions: float) -> None:
    """Layers, embedding, and a head where it is not the embedding."""
    shape = shape_of(name)
    vocabularies = 1 if name in TIED else 2
    total = shape.num_layers * shape.layer_weights + vocabularies * shape.vocab * shape.hidden
    assert total / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("name", "num_bytes"), [("llama-7b", 16384), ("llama-3.1-8b", 4096), ("llama-7b-mqa", 512), ("smollm2-135m", 768)]
)
def test_kv_bytes_of_a_token_in_a_layer(name: str, num_bytes: int) -> None:
    assert shape_of(name).kv_bytes == num_bytes


def test_projections_are_a_quarter_of_llama_7b() -> None:
    assert shape_of("llama-7b").project_share == pytest.approx(0.2487, abs=1e-4)


MIXTURE = {**FIELDS, "num_experts": 8, "num_active_experts": 2}


def test_a_mixture_multiplies_by_the_experts_of_a_token() -> None:
    dense, mixture = shape_from(FIELDS, "here"), shape_from(MIXTURE, "here")
    assert mixture.ffn_weights == dense.ffn_weights == 3 * 8 * 16
    assert mixture.layer_weights == dense.layer_weights + dense.ffn_weights
    assert (mixture.active_ffn, dense.active_ffn) == (32, 16)


def test_a_step_reads_the_experts_that_its_tokens_touch() -> None:
    dense, mixture = shape_from(FIELDS, "here"), shape_from(MIXTURE, "here")
    assert dense.read_weights(1) == dense.read_weights(100) == dense.step_weights
    assert mixture.read_weights(1) == mixture.step_weights
    touched = 8 * (1 - 0.75**3)
    assert mixture.read_weights(3) == pytest.approx(mixture.step_weights + 2 * (touched - 2) * mixture.ffn_weights)
    assert mixture.read_weights(1000) == pytest.approx(mixture.step_weights + 2 * 6 * mixture.ffn_weights)


def test_more_active_experts_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_active_experts = 9 is out of range: give at most num_experts = 8"):
        shape_from({**MIXTURE, "num_active_experts": 9}, "here")


def test_experts_tell_shapes_apart_and_their_absence_changes_nothing() -> None:
    assert shape_from(FIELDS, "here").identity == {**FIELDS, "gated": True, "dtype_bytes": 2}
    assert shape_from(MIXTURE, "here").identity == {**MIXTURE, "gated": True, "dtype_bytes": 2}


def test_shape_from_fields() -> None:
    assert shape_from(FIELDS, "here") == ModelShape(2, 8, 4, 2, 2, 16, 100)
    assert not shape_from({**FIELDS, "gated": False}, "here").gated


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ffn": None}, "here: ffn is missing"),
        ({"depth": 3}, "here: depth is not a field"),
        ({"hidden": 0}, "hidden = 0"),
        ({"num_heads": 3}, "num_heads = 3 is not a multiple"),
    ],
)
def test_wrong_shapes_name_the_field(change: dict[str, Any], text: str) -> None:
    fields = {name: value for name, value in {**FIELDS, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=text):
        shape_from(fields, "here")


def test_unknown_models_list_the_known() -> None:
    with pytest.raises(ConfigError, match=", ".join(SHAPES)):
        shape_of("gpt-5")
