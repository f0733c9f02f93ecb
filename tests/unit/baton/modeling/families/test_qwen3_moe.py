"""Qwen3-MoE's configs, as they were released, and its experts in a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.modeling.checkpoints.registry import read_model
from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.families.qwen3_moe import Qwen3MoeModel
from baton.modeling.forward.experts import LinearExperts, mixtures
from baton.modeling.forward.linear import PanelLinear
from baton.modeling.forward.weight_sizes import bytes_per_step, step_reads, weight_bytes
from baton.modeling.kernels import native
from generate_workers.engine.model_shape import model_shape
from tests.support.models.configs import refusal
from tests.support.models.tiny_models import load_tiny
from tests.support.paths import whole

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def model(**changes: object) -> Qwen3MoeModel:
    made = read_model({**QWEN3_30B_A3B, **changes}, source="folder/config.json")
    assert isinstance(made, Qwen3MoeModel)
    return made


def test_qwen3_30b_a3b_as_released() -> None:
    made = model()
    assert (made.config.num_experts, made.config.num_active_experts, made.config.intermediate_size) == (128, 8, 768)
    assert made.normalised
    assert made.qk_norm
    assert set(made.config.windows) == {None}


def test_the_number_of_experts_in_the_spelling_of_transformers_5() -> None:
    assert model(num_experts=None, num_local_experts=64).config.num_experts == 64


def test_its_shape_counts_the_experts_of_a_token_and_those_that_a_step_touches() -> None:
    shape = model_shape(model().config, 2)
    attention = 2048 * 128 * (32 + 2 * 4) + 2048 * 128 * 32
    expert = 3 * 2048 * 768
    assert shape.layer_weights == attention + 8 * expert
    assert shape.linear_flops == 2 * (attention + 8 * expert)
    assert shape.read_weights(1) == pytest.approx(shape.step_weights)
    touched = 128 * (1 - (120 / 128) ** 16)
    assert shape.read_weights(16) == pytest.approx(shape.step_weights + 48 * (touched - 8) * expert)
    assert shape.read_weights(10_000) == pytest.approx(shape.step_weights + 48 * 120 * expert)


def test_a_window_holds_in_all_layers() -> None:
    assert set(model(use_sliding_window=True, sliding_window=4096).config.windows) == {4096}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mlp_only_layers": [0]}, "mlp_only_layers: [0] is not supported"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok: 129 is more than num_experts 128"),
        ({"num_experts": None}, "num_experts: is missing"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size: is missing"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    assert named in refusal({**QWEN3_30B_A3B, **changes})


def test_a_step_reads_the_experts_that_it_touches(tmp_path: Path) -> None:
    decoder = load_tiny("qwen3_moe", tmp_path)
    (first, second) = mixtures(decoder.weights.layers)
    assert isinstance(first.products, LinearExperts)
    expert = 3 * 64 * 64 * 4
    reads = step_reads(decoder.weights)
    assert (reads.experts, reads.active_share) == (2 * 8 * expert, 2 / 8)
    assert reads.of(1) == reads.always + 2 * 2 * expert
    assert reads.of(1) == bytes_per_step(decoder.weights)
    assert reads.of(2) == reads.always + round(2 * 8 * expert * (1 - 0.75**2))
    assert reads.of(1000) == reads.always + reads.experts
    assert weight_bytes(decoder.weights) > reads.always + reads.experts
    assert second.num_active == 2


@pytest.mark.skipif(not native.load(), reason="needs a C++ compiler")
@torch.inference_mode()
def test_experts_may_be_rounded_to_int8(tmp_path: Path) -> None:
    exact, token_ids = load_tiny("qwen3_moe", tmp_path), list(range(3, 103))
    rounded = load_decoder(tmp_path, dtype="bfloat16", weights="int8")
    products = mixtures(rounded.weights.layers)[0].products
    assert isinstance(products, LinearExperts)
    assert isinstance(products.down[0], PanelLinear)
    assert step_reads(rounded.weights).experts < step_reads(exact.weights).experts / 3.5
    expected_TV = whole(exact, token_ids)
    error_T = (whole(rounded, token_ids) - expected_TV).square().mean(-1).sqrt()
    # where rounding chose another expert, the error is of another kind
    assert error_T.median() < 0.1 * expected_TV.std()


def test_experts_take_part_as_the_router_says(tmp_path: Path) -> None:
    decoder = load_tiny("qwen3_moe", tmp_path)
    mixture = mixtures(decoder.weights.layers)[0]
    weight_TA, expert_TA = mixture.route(torch.randn(200, 64))
    assert torch.allclose(weight_TA.sum(1), torch.ones(200))
    assert set(expert_TA.flatten().tolist()) == set(range(8)), "every expert must be tested"
