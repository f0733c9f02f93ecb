"""Gemma 3's configs, as they were released, and what they mean for windows, RoPE, norms and embeddings."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.modeling.checkpoints.registry import read_model
from baton.modeling.families.gemma3 import Gemma3Model
from baton.modeling.forward.layers import SandwichNorm
from baton.modeling.forward.norms import HeadNorms, WideRmsNorm
from baton.modeling.forward.rope import LayeredRotaryTable
from tests.support.models.configs import refusal
from tests.support.models.tiny_models import load_tiny

GEMMA3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}


def model(**changes: object) -> Gemma3Model:
    made = read_model({**GEMMA3_1B, **changes}, source="folder/config.json")
    assert isinstance(made, Gemma3Model)
    return made


def test_gemma3_1b_as_released() -> None:
    made = model()
    assert [layer for layer, window in enumerate(made.config.windows) if window is None] == [5, 11, 17, 23]
    assert set(made.config.windows) == {512, None}
    assert (made.config.rope_theta, made.local_theta, made.query_scale) == (1e6, 1e4, 1.0)
    assert made.config.tie_embeddings
    assert made.config.eos_token_ids == (1, 106)


def test_scores_are_scaled_by_the_configs_number() -> None:
    assert model(query_pre_attn_scalar=64).query_scale == 2.0


def test_rope_in_the_spelling_of_transformers_5() -> None:
    by_kind = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    made = model(rope_parameters=by_kind, rope_theta=None, rope_local_base_freq=None)
    assert (made.config.rope_theta, made.local_theta) == (5e5, 2e4)
    assert (made.config.rope_scaling.kind, made.config.rope_scaling.factor) == ("linear", 8.0)


def test_the_old_spelling_scales_full_layers_only() -> None:
    made = model(rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert made.config.rope_scaling.factor == 8.0
    assert (made.config.rope_theta, made.local_theta) == (1e6, 1e4)


def test_layers_may_be_named_one_by_one() -> None:
    kinds = ["full_attention", "sliding_attention"]
    assert model(num_hidden_layers=2, layer_types=kinds).config.windows == (None, 512)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: 50.0 is not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: 30.0 is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: True is not supported"),
        ({"hidden_activation": "gelu"}, "hidden_activation"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"layer_types": ["full_attention"]}, "layer_types: does not list 26 layers"),
        ({"layer_types": ["chunked_attention"] * 26}, "layer_types: 'chunked_attention' is not supported"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "sliding_attention"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "'dynamic'"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    assert named in refusal({**GEMMA3_1B, **changes})


def test_norms_multiply_by_one_more_than_their_weight_in_fp32(tmp_path: Path) -> None:
    decoder = load_tiny("gemma3", tmp_path, dtype="bfloat16")
    layer = decoder.weights.layers[0]
    assert isinstance(layer.tail, SandwichNorm)
    assert isinstance(layer.head_norm, HeadNorms)
    assert isinstance(layer.attention_norm, WideRmsNorm)
    assert layer.attention_norm.gain_D.dtype == torch.float32
    assert layer.attention_norm.gain_D.mean() == pytest.approx(2.0, abs=0.1)  # the tiny model's weights are about 1
    x_TD = torch.randn(3, 64, dtype=torch.bfloat16)
    assert layer.attention_norm(x_TD).dtype == torch.bfloat16


def test_embeddings_are_scaled_in_the_dtype_of_the_weights(tmp_path: Path) -> None:
    decoder = load_tiny("gemma3", tmp_path)
    ids_T = torch.tensor([3, 9])
    expected = decoder.weights.head.weight()[ids_T] * 8.0
    assert torch.equal(decoder.embeddings(ids_T), expected)


def test_layers_with_a_window_turn_by_another_base(tmp_path: Path) -> None:
    positions = load_tiny("gemma3", tmp_path).weights.positions
    assert isinstance(positions, LayeredRotaryTable)
    assert positions.by_layer == (1, 0, 1, 0)
    rotation, x_TNH = positions.lookup(torch.tensor([50])), torch.randn(1, 2, 32)
    turned = [rotation.turn(x_TNH.clone(), layer) for layer in range(4)]
    assert torch.equal(turned[0], turned[2])
    assert torch.equal(turned[1], turned[3])
    assert not torch.allclose(turned[0], turned[1])
