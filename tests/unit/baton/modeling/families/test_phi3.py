"""Phi-3's configs, as they were released, and the order in which Phi-4-mini's heads are loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.modeling.checkpoints.registry import read_model
from baton.modeling.families.phi3 import Phi3Model
from baton.modeling.forward.model_config import RopeScaling
from baton.modeling.forward.rope import RotaryTable, inverse_frequencies
from tests.support.models.configs import refusal, write_and_load

PHI3_MINI_4K: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 2,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "vocab_size": 32064,
}
PHI3_MINI_128K = {
    **PHI3_MINI_4K,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "long_factor": [1.0 + pair for pair in range(48)],
        "short_factor": [1.0 + 0.1 * pair for pair in range(48)],
        "type": "longrope",
    },
    "sliding_window": 262144,
}
PHI4_MINI = {
    **PHI3_MINI_128K,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}


def model(base: dict[str, Any], **changes: object) -> Phi3Model:
    made = read_model({**base, **changes}, source="folder/config.json")
    assert isinstance(made, Phi3Model)
    return made


def test_phi3_mini_as_released() -> None:
    made = model(PHI3_MINI_4K).config
    assert (made.model_type, made.num_kv_heads, made.head_dim, made.windows) == ("phi3", 32, 96, (2047, 2047))
    assert (made.rope_theta, made.rope_scaling, made.rotary_dim) == (10000.0, RopeScaling(), None)


def test_a_longer_context_takes_the_long_factors() -> None:
    scaling = model(PHI3_MINI_128K).config.rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_max_position) == ("longrope", 32.0, 4096)
    assert scaling.factors == tuple(1.0 + pair for pair in range(48))
    inv_freq, factor = inverse_frequencies(model(PHI3_MINI_128K).config)
    assert factor == pytest.approx((1 + 5 / 12) ** 0.5)  # log 32 / log 4096
    assert inv_freq[2] == pytest.approx(10000 ** (-4 / 96) / 3)


def test_the_context_that_it_was_trained_with_takes_the_short_factors() -> None:
    made = model(PHI3_MINI_128K, max_position_embeddings=4096).config
    assert made.rope_scaling.factors == tuple(1.0 + 0.1 * pair for pair in range(48))
    assert inverse_frequencies(made)[1] == 1.0


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_early_names_of_longrope(name: str) -> None:
    scaling = {**PHI3_MINI_128K["rope_scaling"], "type": name}
    assert model(PHI3_MINI_128K, rope_scaling=scaling) == model(PHI3_MINI_128K)


def test_a_window_as_long_as_the_context_hides_nothing() -> None:
    assert model(PHI3_MINI_128K).config.windows == (None, None)


def test_phi4_mini_turns_a_part_of_each_head() -> None:
    made = model(PHI4_MINI).config
    assert (made.head_dim, made.rotary_dim) == (128, 96)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_bias": True}, "attention_bias: True is not supported"),
        ({"mlp_bias": True}, "mlp_bias: True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.515}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "long_factor: is not a list of 48 numbers"),
        ({"rope_scaling": {**PHI3_MINI_128K["rope_scaling"], "long_factor": [0] * 48}}, "long_factor"),
        ({"rope_scaling": {**PHI3_MINI_128K["rope_scaling"], "short_mscale": 1.2}}, "short_mscale"),
        ({"rope_scaling": {"type": "dynamic"}}, "'dynamic'"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    assert named in refusal({**PHI3_MINI_128K, **changes})


def test_dimensions_that_turn_come_first_in_each_half_of_queries_and_keys(tmp_path: Path) -> None:
    """The first 4 of a head's 8 dimensions turn: pairs (0, 2) and (1, 3)."""
    config = {
        **PHI4_MINI,
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": 5,
        "max_position_embeddings": 32,
        "rope_scaling": None,
        "partial_rotary_factor": 0.5,
    }
    numbers = torch.arange(32.0).unsqueeze(1).expand(32, 16).contiguous()
    at = "model.layers.0"
    tensors = {
        "model.embed_tokens.weight": torch.zeros(5, 16),
        "model.norm.weight": torch.ones(16),
        f"{at}.input_layernorm.weight": torch.ones(16),
        f"{at}.post_attention_layernorm.weight": torch.ones(16),
        f"{at}.self_attn.qkv_proj.weight": numbers,
        f"{at}.self_attn.o_proj.weight": torch.zeros(16, 16),
        f"{at}.mlp.gate_up_proj.weight": torch.zeros(16, 16),
        f"{at}.mlp.down_proj.weight": torch.zeros(16, 8),
    }
    decoder = write_and_load(tmp_path, config, tensors)
    order = [0, 1, 4, 5, 2, 3, 6, 7]
    expected = [8 * head + dim for head in range(3) for dim in order] + list(range(24, 32))
    assert decoder.weights.layers[0].qkv.weight()[:, 0].tolist() == expected


def test_dimensions_that_do_not_turn_stay_as_they_are() -> None:
    config = model(PHI4_MINI).config
    table = RotaryTable(config, torch.device("cpu"), torch.float32)
    x_TNH = torch.randn(1, 2, 128)
    turned_TNH = table.lookup(torch.tensor([100])).turn(x_TNH.clone(), 0)
    assert torch.equal(turned_TNH[..., 48:64], x_TNH[..., 48:64])
    assert torch.equal(turned_TNH[..., 112:], x_TNH[..., 112:])
    assert not torch.isclose(turned_TNH[..., :48], x_TNH[..., :48]).all()
