"""RoPE's frequencies under every scaling, checked against their definitions; its table, and the rotation."""

import dataclasses
import math

import pytest
import torch

from baton.modeling.checkpoints.registry import ModelConfig, RopeScaling
from baton.modeling.forward.rope import RotaryTable, apply_rotary, inverse_frequencies
from tests.support.models.tiny_models import random_decoder

HEAD_DIM, THETA, CONTEXT = 16, 10000.0, 64
PLAIN = [THETA ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)]
CONFIG = random_decoder(num_layers=1, head_dim=HEAD_DIM, max_position=CONTEXT).config


def config(scaling: RopeScaling | None = None) -> ModelConfig:
    return dataclasses.replace(CONFIG, rope_theta=THETA, rope_scaling=scaling or RopeScaling())


def frequencies(scaling: RopeScaling) -> tuple[list[float], float]:
    inv_freq, factor = inverse_frequencies(config(scaling))
    assert inv_freq.dtype == torch.float32
    return inv_freq.tolist(), factor


def test_default_frequencies_fall_geometrically() -> None:
    inv_freq, factor = frequencies(RopeScaling())
    assert inv_freq == pytest.approx(PLAIN, rel=1e-6)
    assert factor == 1.0


def test_linear_scaling_divides_all_frequencies() -> None:
    inv_freq, factor = frequencies(RopeScaling("linear", 4.0))
    assert inv_freq == pytest.approx([value / 4 for value in PLAIN], rel=1e-6)
    assert factor == 1.0


def test_llama3_keeps_short_waves_slows_long_ones_and_blends_between() -> None:
    original, low, high, factor = 512, 1.0, 4.0, 8.0
    expected = []
    for value in PLAIN:
        wavelength = 2 * math.pi / value
        if wavelength < original / high:
            expected.append(value)
        elif wavelength > original / low:
            expected.append(value / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            expected.append((1 - smooth) * value / factor + smooth * value)
    inv_freq, attention = frequencies(RopeScaling("llama3", factor, low, high, original_max_position=original))
    assert inv_freq == pytest.approx(expected, rel=1e-6)
    assert attention == 1.0
    kinds = {
        (got == pytest.approx(value), got == pytest.approx(value / 8))
        for got, value in zip(inv_freq, PLAIN, strict=True)
    }
    assert len(kinds) == 3, "the case must have kept, slowed and blended dimensions"


def test_yarn_keeps_fast_dimensions_and_interpolates_slow_ones() -> None:
    inv_freq, factor = frequencies(RopeScaling("yarn", 4.0, original_max_position=4096))
    assert inv_freq[0] == pytest.approx(PLAIN[0])
    assert inv_freq[-1] == pytest.approx(PLAIN[-1] / 4)
    ratios = [got / value for got, value in zip(inv_freq, PLAIN, strict=True)]
    assert ratios == pytest.approx(sorted(ratios, reverse=True))
    assert any(0.3 < ratio < 0.95 for ratio in ratios), "the case must have blended dimensions"
    assert factor == pytest.approx(0.1 * math.log(4.0) + 1)


def test_yarns_explicit_attention_factor_wins() -> None:
    assert frequencies(RopeScaling("yarn", 4.0, original_max_position=64, attention_factor=1.25))[1] == 1.25


@pytest.mark.parametrize("scaling", [RopeScaling(), RopeScaling("yarn", 4.0, original_max_position=64)])
def test_table_holds_cosines_and_sines_of_position_times_frequency(scaling: RopeScaling) -> None:
    inv_freq, factor = inverse_frequencies(config(scaling))
    rotation = RotaryTable(config(scaling), torch.device("cpu"), torch.float32).lookup(torch.tensor([0, 63, 5]))
    cos_TH, sin_TH = rotation.cos_T1H.squeeze(1), rotation.sin_T1H.squeeze(1)
    angles = 63 * inv_freq.double()
    assert torch.equal(cos_TH[0], torch.full((HEAD_DIM,), factor))
    torch.testing.assert_close(cos_TH[1], (torch.cat([angles, angles]).cos() * factor).float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(sin_TH[1], (torch.cat([-angles, angles]).sin() * factor).float(), atol=1e-5, rtol=0)


def test_table_is_in_the_decoders_dtype() -> None:
    rotation = RotaryTable(config(), torch.device("cpu"), torch.bfloat16).lookup(torch.tensor([1]))
    assert rotation.cos_T1H.dtype == rotation.sin_T1H.dtype == torch.bfloat16


def test_position_behind_the_context_is_a_bug() -> None:
    with pytest.raises(IndexError):
        RotaryTable(config(), torch.device("cpu"), torch.float32).lookup(torch.tensor([CONTEXT]))


def test_rotation_turns_each_pair_of_halves_by_its_angle() -> None:
    rotation = RotaryTable(config(), torch.device("cpu"), torch.float32).lookup(torch.tensor([7]))
    x_TNH = torch.randn(1, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    turned = apply_rotary(x_TNH, rotation)
    half = HEAD_DIM // 2
    pairs = torch.complex(x_TNH[..., :half].double(), x_TNH[..., half:].double())
    expected = pairs * torch.polar(torch.ones(half).double(), 7 * torch.tensor(PLAIN).double())
    torch.testing.assert_close(turned[..., :half].double(), expected.real, atol=1e-5, rtol=0)
    torch.testing.assert_close(turned[..., half:].double(), expected.imag, atol=1e-5, rtol=0)


def test_scores_depend_on_distance_only() -> None:
    table = RotaryTable(dataclasses.replace(config(), max_position=200), torch.device("cpu"), torch.float32)
    generator = torch.Generator().manual_seed(0)
    q_TNH, k_TNH = torch.randn(1, 1, HEAD_DIM, generator=generator), torch.randn(1, 1, HEAD_DIM, generator=generator)

    def score(query_position: int, key_position: int) -> float:
        q = apply_rotary(q_TNH, table.lookup(torch.tensor([query_position])))
        k = apply_rotary(k_TNH, table.lookup(torch.tensor([key_position])))
        return float((q * k).sum())

    assert score(13, 4) == pytest.approx(score(170, 161), abs=1e-4)
    assert score(13, 4) != pytest.approx(score(13, 5), abs=1e-2)
