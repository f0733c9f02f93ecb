"""Hugging Face configs to ModelConfig: every family's switches, both spellings of RoPE, and what is refused."""

import math
from typing import Any

import pytest

from baton.modeling.checkpoints.registry import ModelConfig, RopeScaling, from_hf, read_model
from baton.modeling.families.llama import LlamaModel
from tests.support.models.configs import refusal

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}


def config(base: dict[str, Any], **changes: object) -> ModelConfig:
    return from_hf({**base, **changes}, source="folder/config.json")


def model(base: dict[str, Any], **changes: object) -> LlamaModel:
    made = read_model({**base, **changes})
    assert isinstance(made, LlamaModel)
    return made


def test_llama_defaults_are_those_of_transformers() -> None:
    assert config(LLAMA) == ModelConfig(
        model_type="llama",
        vocab_size=1000,
        num_layers=3,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=2048,
        tie_embeddings=False,
        rope_theta=10000.0,
        rope_scaling=RopeScaling(),
        windows=(None, None, None),
    )


def test_norms_have_the_configs_epsilon() -> None:
    assert model(LLAMA, rms_norm_eps=3e-6).norm_eps == 3e-6


def test_llama_without_kv_heads_has_one_for_each_head() -> None:
    assert config(LLAMA, num_key_value_heads=None).num_kv_heads == 4


def test_explicit_head_dim_wins() -> None:
    assert config(LLAMA, head_dim=32).head_dim == 32


def test_attention_bias_of_llama_is_on_all_four_projections() -> None:
    made = model(LLAMA, attention_bias=True, mlp_bias=True)
    assert (made.qkv_bias, made.output_bias, made.mlp_bias) == (True, True, True)


def test_qwen2_has_bias_on_query_key_and_value_only() -> None:
    made = model(QWEN2)
    assert (made.qkv_bias, made.output_bias, made.mlp_bias, made.qk_norm) == (True, False, False, False)


def test_qwen3_normalises_heads_of_128() -> None:
    made = model(QWEN3)
    assert (made.qk_norm, made.qkv_bias) == (True, False)
    assert (made.config.head_dim, made.config.windows) == (128, (None, None, None))


def test_mistral_has_its_window_in_every_layer() -> None:
    assert config(MISTRAL, sliding_window=8).windows == (8, 8, 8)


def test_mistral_with_null_window_sees_everything_and_absent_means_4096() -> None:
    assert config(MISTRAL, sliding_window=None).windows == (None, None, None)
    assert config(MISTRAL).windows == (4096, 4096, 4096)


def test_qwen_ignores_the_window_unless_it_is_switched_on() -> None:
    assert config(QWEN2, sliding_window=8, max_window_layers=1).windows == (None, None, None)


def test_qwen_windows_start_at_max_window_layers() -> None:
    made = config(QWEN2, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert made.windows == (None, 8, 8)


def test_layer_types_say_where_qwen_has_windows() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    made = config(QWEN3, use_sliding_window=True, sliding_window=8, max_window_layers=3, layer_types=kinds)
    assert made.windows == (8, None, 8)


@pytest.mark.parametrize("layer_types", [["full_attention"], ["linear_attention"] * 3, ["sliding_attention"] * 3, 5])
def test_layer_types_that_do_not_fit_are_refused(layer_types: object) -> None:
    assert "layer_types" in refusal({**QWEN2, "layer_types": layer_types})


ROPE = {
    "linear": ({"factor": 4.0}, RopeScaling("linear", 4.0)),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512},
        RopeScaling("llama3", 8.0, 1.0, 4.0, original_max_position=512),
    ),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 16},
        RopeScaling("yarn", 4.0, original_max_position=512, beta_fast=16.0),
    ),
}


@pytest.mark.parametrize("kind", ROPE)
@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_rope_scaling_in_the_old_spelling(kind: str, spelling: str) -> None:
    parameters, expected = ROPE[kind]
    made = config(LLAMA, rope_theta=5e5, rope_scaling={spelling: kind, **parameters})
    assert (made.rope_theta, made.rope_scaling) == (5e5, expected)


@pytest.mark.parametrize("kind", ROPE)
def test_rope_scaling_in_the_spelling_of_transformers_5(kind: str) -> None:
    parameters, expected = ROPE[kind]
    made = config(LLAMA, rope_parameters={"rope_type": kind, "rope_theta": 5e5, **parameters})
    assert (made.rope_theta, made.rope_scaling) == (5e5, expected)


def test_original_context_defaults_to_the_context_and_the_outer_field_wins() -> None:
    parameters = {"rope_type": "yarn", "factor": 4.0}
    assert config(LLAMA, rope_scaling=parameters).rope_scaling.original_max_position == 2048
    made = config(LLAMA, rope_scaling=parameters, original_max_position_embeddings=256)
    assert made.rope_scaling.original_max_position == 256


def test_yarn_attention_factor_is_taken_or_follows_from_mscale() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert config(LLAMA, rope_scaling={**yarn, "attention_factor": 1.5}).rope_scaling.attention_factor == 1.5
    made = config(LLAMA, rope_scaling={**yarn, "mscale": 2.0, "mscale_all_dim": 1.0})
    log = 0.1 * math.log(4.0)
    assert made.rope_scaling.attention_factor == pytest.approx((2 * log + 1) / (log + 1))


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "longrope"}, "short_factor: is not a list of 8 numbers"),
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic'"),
        ({"rope_type": "linear"}, "factor: is missing"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "low_freq_factor"),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": False}, "truncate"),
        ({"rope_type": "yarn", "factor": "4"}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "one set of parameters"),
        (["linear"], "one set of parameters"),
    ],
)
def test_rope_that_cannot_be_computed_is_refused(scaling: object, named: str) -> None:
    assert named in refusal({**LLAMA, "rope_scaling": scaling})


@pytest.mark.parametrize(("value", "expected"), [(5, (5,)), ([5, 6], (5, 6)), (None, ())])
def test_eos_is_one_id_or_several_or_none(value: object, expected: tuple[int, ...]) -> None:
    assert config(LLAMA, eos_token_id=value).eos_token_ids == expected


def test_generation_configs_eos_wins() -> None:
    raw = {**LLAMA, "eos_token_id": 5}
    assert from_hf(raw, {"eos_token_id": [7, 8]}).eos_token_ids == (7, 8)
    assert from_hf(raw, {"temperature": 1.0}).eos_token_ids == (5,)


@pytest.mark.parametrize("value", ["</s>", [1, "2"], True, -1])
def test_eos_that_is_no_token_id_is_refused(value: object) -> None:
    assert "eos_token_id" in refusal({**LLAMA, "eos_token_id": value})


@pytest.mark.parametrize(
    "field",
    [
        "vocab_size",
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "rms_norm_eps",
        "max_position_embeddings",
    ],
)
def test_missing_field_is_named(field: str) -> None:
    assert f"{field}: is missing" in refusal({**LLAMA, field: None})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "gemma3"),
        ("model_type", None),
        ("architectures", ["LlamaForSequenceClassification"]),
        ("architectures", ["MistralForCausalLM"]),
        ("hidden_act", "gelu"),
        ("num_key_value_heads", 3),
        ("num_hidden_layers", 2.5),
        ("num_hidden_layers", 0),
        ("hidden_size", "64"),
        ("vocab_size", True),
        ("head_dim", 15),
        ("tie_word_embeddings", "yes"),
        ("bos_token_id", "<s>"),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_field_that_the_decoder_cannot_run_is_refused_by_name(field: str, value: object) -> None:
    assert field in refusal({**LLAMA, field: value})
