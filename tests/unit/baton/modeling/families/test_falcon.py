"""Falcon's configs, as they were released, and what its loader makes of a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.errors import ModelError
from baton.modeling.checkpoints.registry import read_model
from baton.modeling.families.falcon import FalconModel
from baton.modeling.forward.layers import Parallel, Sequential
from baton.modeling.forward.model_config import ModelConfig, RopeScaling
from tests.support.models.configs import refusal, write_and_load

FALCON_7B: dict[str, Any] = {
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["FalconForCausalLM"],
    "bias": False,
    "bos_token_id": 11,
    "eos_token_id": 11,
    "hidden_size": 4544,
    "layer_norm_epsilon": 1e-05,
    "model_type": "falcon",
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 2,
    "parallel_attn": True,
    "vocab_size": 65024,
}
FALCON_40B = {
    **FALCON_7B,
    "hidden_size": 8192,
    "new_decoder_architecture": True,
    "num_attention_heads": 128,
    "num_kv_heads": 8,
}
FALCON_11B = {
    **FALCON_40B,
    "ffn_hidden_size": 16384,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_ln_in_parallel_attn": 1,
    "rope_theta": 500042.0,
    "tie_word_embeddings": False,
}
FALCON_RW = {
    **FALCON_7B,
    "alibi": True,
    "bias": True,
    "hidden_size": 2048,
    "multi_query": False,
    "num_attention_heads": 32,
    "parallel_attn": False,
}
ROTARY_RW = {**FALCON_RW, "alibi": False}
VOCAB, HEADS, HEAD_DIM = 11, 4, 2
HIDDEN = HEADS * HEAD_DIM
SHAPE = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_hidden_layers": 1}
TINY_40B = {**FALCON_40B, **SHAPE, "num_kv_heads": 2}
AT = "transformer.h.0"
FUSED = f"{AT}.self_attention.query_key_value"


def model(base: dict[str, Any], **changes: object) -> FalconModel:
    made = read_model({**base, **changes}, source="folder/config.json")
    assert isinstance(made, FalconModel)
    return made


def tensors(num_kv_heads: int, norms: tuple[str, ...], bias: bool = False) -> dict[str, Tensor]:
    """A tiny checkpoint's, of one layer; each row of the fused projection holds its number everywhere."""
    num_rows = (HEADS + 2 * num_kv_heads) * HEAD_DIM
    linears = {
        "self_attention.dense": (HIDDEN, HIDDEN),
        "mlp.dense_h_to_4h": (4 * HIDDEN, HIDDEN),
        "mlp.dense_4h_to_h": (HIDDEN, 4 * HIDDEN),
    }
    rows = torch.arange(num_rows, dtype=torch.float32)
    content = {f"{FUSED}.weight": rows.unsqueeze(1).repeat(1, HIDDEN)}
    content |= {f"{AT}.{name}.weight": torch.randn(shape) for name, shape in linears.items()}
    if bias:
        content |= {f"{AT}.{name}.bias": torch.randn(shape[0]) for name, shape in linears.items()}
        content[f"{FUSED}.bias"] = rows
    for name in (*(f"{AT}.{norm}" for norm in norms), "transformer.ln_f"):
        content |= {f"{name}.{kind}": torch.randn(HIDDEN) for kind in ("weight", "bias")}
    return {**content, "transformer.word_embeddings.weight": torch.randn(VOCAB, HIDDEN)}


def test_falcon_7b_with_what_its_config_leaves_out() -> None:
    assert model(FALCON_7B) == FalconModel(
        ModelConfig(
            model_type="falcon",
            vocab_size=65024,
            num_layers=2,
            hidden_size=4544,
            intermediate_size=4 * 4544,
            num_heads=71,
            num_kv_heads=1,
            head_dim=64,
            max_position=2048,
            tie_embeddings=True,
            rope_theta=10000.0,
            rope_scaling=RopeScaling(),
            windows=(None, None),
            eos_token_ids=(11,),
            bos_token_id=11,
            is_gated=False,
        ),
        norm_eps=1e-5,
        bias=False,
        activation="gelu",
        parallel=True,
        attention_norm="input_layernorm",
        mlp_norm="input_layernorm",
    )


def test_kv_heads_count_in_the_new_architecture_only() -> None:
    assert model(FALCON_40B).config.num_kv_heads == 8
    assert model(FALCON_7B, num_kv_heads=71).config.num_kv_heads == 1
    assert model(ROTARY_RW).config.num_kv_heads == 32


def test_falcon_40b_has_a_norm_for_attention_and_one_for_the_mlp() -> None:
    made = model(FALCON_40B)
    assert (made.parallel, made.attention_norm, made.mlp_norm) == (True, "ln_attn", "ln_mlp")


def test_falcon_11b_has_one_norm_its_own_head_and_its_own_rope() -> None:
    made = model(FALCON_11B)
    assert (made.attention_norm, made.mlp_norm) == ("input_layernorm", "input_layernorm")
    assert (made.config.tie_embeddings, made.config.intermediate_size, made.config.rope_theta) == (False, 16384, 500042)


def test_the_old_order_has_a_norm_behind_attention() -> None:
    made = model(ROTARY_RW)
    assert (made.parallel, made.bias, made.mlp_norm) == (False, True, "post_attention_layernorm")


@pytest.mark.parametrize(
    ("base", "field", "value", "problem"),
    [
        (FALCON_RW, "alibi", True, "true is not supported: attention takes no bias by distance; choose a Falcon with"),
        (FALCON_7B, "activation", "silu", "'silu' is not supported; choose a model that uses relu or gelu"),
        (FALCON_7B, "num_attention_heads", 70, "70 does not divide hidden_size 4544; correct the file"),
        (FALCON_7B, "num_ln_in_parallel_attn", 2, "2 is not supported with this decoder architecture; "),
        (FALCON_40B, "num_ln_in_parallel_attn", 3, "3 is not supported with this decoder architecture; "),
        (FALCON_40B, "parallel_attn", False, "false is not supported with new_decoder_architecture; "),
        (FALCON_40B, "num_kv_heads", 7, "7 does not divide 128 attention heads; correct the file"),
        (FALCON_7B, "head_dim", 63, "63 is odd, and RoPE turns pairs of dimensions; "),
        (FALCON_7B, "rope_scaling", {"rope_type": "dynamic", "factor": 2.0}, "'dynamic' is not supported; "),
    ],
)
def test_config_that_cannot_be_run_is_refused_in_one_line(
    base: dict[str, Any], field: str, value: object, problem: str
) -> None:
    changes = {"hidden_size": 71 * 63} if field == "head_dim" else {field: value}
    message = refusal({**base, **changes})
    assert message.startswith(f"{field}: ") and problem in message


LAYOUTS = {
    "one group": (
        {**FALCON_7B, **SHAPE},
        1,
        ("input_layernorm",),
        [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]],
    ),
    "groups": (
        TINY_40B,
        2,
        ("ln_attn", "ln_mlp"),
        [[0, 1], [2, 3], [8, 9], [10, 11], [4, 5], [12, 13], [6, 7], [14, 15]],
    ),
    "one for each head": (
        {**ROTARY_RW, **SHAPE},
        4,
        ("input_layernorm", "post_attention_layernorm"),
        [[0, 1], [6, 7], [12, 13], [18, 19], [2, 3], [8, 9], [14, 15], [20, 21], [4, 5], [10, 11], [16, 17], [22, 23]],
    ),
}
"""Config, kv heads, norms, and which stored rows our queries', keys' and values' heads are, in this order."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_fused_rows_are_put_into_our_order(name: str, tmp_path: Path) -> None:
    config, num_kv_heads, norms, heads = LAYOUTS[name]
    layer = write_and_load(tmp_path, config, tensors(num_kv_heads, norms, config["bias"])).weights.layers[0]
    expected = [row for head in heads for row in head]
    assert layer.qkv.weight()[:, 0].tolist() == expected
    bias_K = layer.qkv.bias()
    assert (bias_K is not None) == config["bias"]
    assert bias_K is None or bias_K.tolist() == expected


def test_one_norm_serves_attention_and_mlp(tmp_path: Path) -> None:
    layer = write_and_load(tmp_path, {**FALCON_7B, **SHAPE}, tensors(1, ("input_layernorm",))).weights.layers[0]
    assert isinstance(layer.tail, Parallel)
    assert layer.tail.norm is layer.attention_norm


def test_layers_are_composed_as_the_config_says(tmp_path: Path) -> None:
    layer = write_and_load(tmp_path, TINY_40B, tensors(2, ("ln_attn", "ln_mlp"))).weights.layers[0]
    assert isinstance(layer.tail, Parallel)
    assert layer.tail.norm is not layer.attention_norm
    content = tensors(4, ("input_layernorm", "post_attention_layernorm"), bias=True)
    assert isinstance(write_and_load(tmp_path, {**ROTARY_RW, **SHAPE}, content).weights.layers[0].tail, Sequential)


@pytest.mark.parametrize("name", sorted(tensors(2, ("ln_attn", "ln_mlp"))))
def test_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    content = tensors(2, ("ln_attn", "ln_mlp"))
    del content[name]
    with pytest.raises(ModelError, match=f"tensor {name} is missing; download the model again"):
        write_and_load(tmp_path, TINY_40B, content)


def test_norms_of_another_variant_are_refused(tmp_path: Path) -> None:
    content = tensors(1, ("input_layernorm", "ln_mlp"))
    with pytest.raises(ModelError, match="2 unknown tensors, the first is transformer.h.0.ln_mlp.bias"):
        write_and_load(tmp_path, {**FALCON_7B, **SHAPE}, content)
