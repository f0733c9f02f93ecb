"""Quantised folders give transformers' logits, which reads them with the library of each format."""

from pathlib import Path

import pytest
import torch

from baton.modeling.checkpoints.weights import load_decoder
from tests.support.models.quantised_folders import VOCAB, quantise_folder, rewrite_config, write_pair
from tests.support.models.tiny_models import build_tiny
from tests.support.paths import whole

NAMES = [
    "packed_int4_asymmetric",
    "packed_int8_asymmetric",
    "int8_tensor_asymmetric",
    "float_channel",
    "float_block",
]
"""Formats that transformers reads on a CPU. Their scales are in fp32, so that no value is rounded to less."""
FAMILIES = [
    *("opt", "opt_350m", "falcon_40b", "falcon_rw_rotary", "qwen3", "mistral_window"),
    *("phi4_mini", "gemma3", "qwen3_moe"),
]
TOLERANCE = 1e-4


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    # a setting of transformers: it would quantise activations, else
    folder = rewrite_config(write_pair(tmp_path, name).quantised, dequantize=True)
    tokens = torch.randint(0, VOCAB, (60,), generator=torch.Generator().manual_seed(5))
    reference = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
    )
    expected_TV = reference(tokens.unsqueeze(0), use_cache=False).logits[0]
    assert expected_TV.std() > 0.5, "flat logits would prove nothing"
    logits_TV = whole(load_decoder(folder), tokens.tolist())
    torch.testing.assert_close(logits_TV, expected_TV, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["awq_groups_of_32", "float_channel"])
@torch.inference_mode()
def test_families_that_fuse_otherwise(family: str, name: str, tmp_path: Path) -> None:
    """Weights are dequantised under the checkpoint's names, before a family fuses and reorders them."""
    build_tiny(family, tmp_path)
    pair = quantise_folder(tmp_path, name)
    tokens = list(range(40))
    expected_TV = whole(load_decoder(pair.plain), tokens)
    assert expected_TV.std() > 0.5, "flat logits would prove nothing"
    assert torch.equal(whole(load_decoder(pair.quantised), tokens), expected_TV)
