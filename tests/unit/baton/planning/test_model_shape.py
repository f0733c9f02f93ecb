"""Shapes: sizes that are known from the models themselves, and errors that name the field."""

from dataclasses import replace
from typing import Any

import pytest

from baton.errors import ConfigError
from baton.planning.model_shape import ModelShape
from baton_lab.study.known_models import TIED, shape_of

DENSE = ModelShape(num_layers=2, hidden=8, num_heads=4, num_kv_heads=2, head_dim=2, ffn=16, vocab=100)
MIXTURE = replace(DENSE, num_experts=8, num_active_experts=2)


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


def test_a_mixture_multiplies_by_the_experts_of_a_token() -> None:
    assert MIXTURE.ffn_weights == DENSE.ffn_weights == 3 * 8 * 16
    assert MIXTURE.layer_weights == DENSE.layer_weights + DENSE.ffn_weights
    assert (MIXTURE.active_ffn, DENSE.active_ffn) == (32, 16)


def test_a_step_reads_the_experts_that_its_tokens_touch() -> None:
    assert DENSE.read_weights(1) == DENSE.read_weights(100) == DENSE.step_weights
    assert MIXTURE.read_weights(1) == MIXTURE.step_weights
    touched = 8 * (1 - 0.75**3)
    assert MIXTURE.read_weights(3) == pytest.approx(MIXTURE.step_weights + 2 * (touched - 2) * MIXTURE.ffn_weights)
    assert MIXTURE.read_weights(1000) == pytest.approx(MIXTURE.step_weights + 2 * 6 * MIXTURE.ffn_weights)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden": 0}, "hidden = 0"),
        ({"num_heads": 3}, "num_heads = 3 is not a multiple"),
        ({"num_active_experts": 9}, "num_active_experts = 9 is out of range: give at most num_experts = 8"),
    ],
)
def test_wrong_shapes_name_the_field(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        replace(MIXTURE, **change)
