"""baton.modeling.forward.sampling: the tokens' distribution against the exact one, and the noise that makes it."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from baton.modeling.forward.drawing import gumbel_noise, noise_key
from baton.modeling.forward.sampling import sample
from baton.sampling_params import SamplingParams
from tests.support.models.sampling import (
    LOGITS,
    SETTINGS,
    Floats,
    draw,
    ids_of,
    make,
    reference_adjusted,
    reference_distribution,
)


def chi_square(counts: NDArray[np.int64], p: Floats) -> float:
    """The p-value of the counts; a token of probability 0 must not occur."""
    assert counts[p == 0].sum() == 0
    expected = p[p > 0] * counts.sum()
    assert expected.min() > 5
    return float(stats.chisquare(counts[p > 0], expected).pvalue)


# The distribution


@pytest.mark.parametrize("fields", SETTINGS)
def test_tokens_over_seeds_have_the_exact_distribution(fields: dict[str, Any]) -> None:
    states = [make(seed, **fields) for seed in range(6000)]
    counts = np.bincount(ids_of(draw(states)), minlength=len(LOGITS))
    assert chi_square(counts, reference_distribution(reference_adjusted(LOGITS, states[0]), states[0].params)) > 1e-3


@pytest.mark.parametrize(
    "fields", [*SETTINGS[:2], *(pytest.param(fields, marks=pytest.mark.nightly) for fields in SETTINGS[2:6])]
)
def test_tokens_over_positions_have_the_exact_distribution(fields: dict[str, Any]) -> None:
    state, ids = make(11, output=[], max_tokens=9000, **fields), []
    for _ in range(6000):
        ids += ids_of(draw([state]))
        state.append(0)
    p = reference_distribution(reference_adjusted(LOGITS, state), state.params)
    assert chi_square(np.bincount(ids, minlength=len(LOGITS)), p) > 1e-3


def test_the_distribution_test_can_fail() -> None:
    states = [make(seed, temperature=1.1) for seed in range(6000)]
    counts = np.bincount(ids_of(draw(states)), minlength=len(LOGITS))
    assert chi_square(counts, reference_distribution(np.array(LOGITS), SamplingParams(temperature=1.0))) < 1e-3


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_a_token_has_the_largest_sum_of_noise_and_logit_over_temperature(temperature: float) -> None:
    """Exactly, where a distribution shows an error of some per cent only."""
    seeds = range(2000)
    noise = gumbel_noise([noise_key(seed, 0) for seed in seeds], torch.arange(len(LOGITS))).numpy()
    states = [make(seed, output=[], temperature=temperature) for seed in seeds]
    assert ids_of(draw(states)) == (np.array(LOGITS) / temperature + noise).argmax(1).tolist()


def test_rare_tokens_are_as_rare_as_they_should_be() -> None:
    """One likely token and 20,000 that share a thousandth: the noise's upper tail decides."""
    logits = torch.zeros(20_001)
    logits[0] = math.log(20_000 * 999)
    num_rare = sum(sample(logits.clone().unsqueeze(0), [make(seed)])[0].token_id != 0 for seed in range(4000))
    assert stats.poisson.cdf(num_rare, 4) > 1e-3
    assert stats.poisson.sf(num_rare - 1, 4) > 1e-3


def test_neighbouring_positions_are_independent() -> None:
    table = np.zeros((4, 4), dtype=np.int64)
    state = make(3, output=[], max_tokens=9000)
    (previous,) = ids_of(draw([state], LOGITS[:4]))
    for _ in range(4000):
        state.append(0)
        (token_id,) = ids_of(draw([state], LOGITS[:4]))
        table[previous, token_id] += 1
        previous = token_id
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_neighbouring_seeds_are_independent() -> None:
    ids = ids_of(draw([make(seed) for seed in range(4001)], LOGITS[:4]))
    table = np.zeros((4, 4), dtype=np.int64)
    np.add.at(table, (ids[:-1], ids[1:]), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-3


# The noise


def test_noise_is_gumbel_distributed() -> None:
    noise = gumbel_noise([noise_key(1, position) for position in range(10)], torch.arange(20_000)).flatten().numpy()
    assert stats.kstest(noise, "gumbel_r").pvalue > 1e-3


def test_noise_has_the_right_upper_tail() -> None:
    noise = gumbel_noise([noise_key(2, position) for position in range(40)], torch.arange(50_000))
    num_beyond = int((noise > 11).sum())
    expected = noise.numel() * stats.gumbel_r.sf(11)
    assert stats.poisson.cdf(num_beyond, expected) > 1e-3
    assert stats.poisson.sf(num_beyond - 1, expected) > 1e-3


def test_noise_of_neighbouring_tokens_and_positions_is_uncorrelated() -> None:
    noise = gumbel_noise([noise_key(0, position) for position in range(2)], torch.arange(100_000)).numpy()
    for one, other in ((noise[0, :-1], noise[0, 1:]), (noise[0], noise[1])):
        assert stats.spearmanr(one, other).pvalue > 1e-3


def splitmix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return value ^ (value >> 31)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_noise_follows_the_written_formula(seed: int) -> None:
    """In Python's own integers, so that a change of the noise, which changes every seeded text, is seen."""
    step, position = 0x9E3779B97F4A7C15, 17
    key = splitmix((splitmix((seed + step) % 2**64) + (position + 1) * step) % 2**64)
    assert noise_key(seed, position) == key
    ids = [0, 1, 49_151, 2**31]
    uniforms = [((splitmix((key + (token_id + 1) * step) % 2**64) >> 12) + 0.5) / 2**52 for token_id in ids]
    noise = gumbel_noise([key], torch.tensor(ids))[0].tolist()
    assert noise == pytest.approx([-math.log(-math.log(u)) for u in uniforms], rel=1e-12)


def unsplitmix(value: int) -> int:
    """The inverse of `splitmix`."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        shifted = value >> shift
        while shifted:
            value, shifted = value ^ shifted, shifted >> shift
        value = value * pow(factor, -1, 2**64) % 2**64
    return value


@pytest.mark.parametrize(("hashed", "noise"), [(0, -math.log(53 * math.log(2))), (2**64 - 1, 53 * math.log(2))])
def test_noise_is_finite_at_both_ends_of_the_hash(hashed: int, noise: float) -> None:
    """u is 2^-53 for all bits zero, and 1 - 2^-53 for all bits one."""
    assert splitmix(unsplitmix(hashed)) == hashed
    key = (unsplitmix(hashed) - 0x9E3779B97F4A7C15) % 2**64
    assert gumbel_noise([key], torch.tensor([0])).item() == pytest.approx(noise)


def test_noise_of_a_token_does_not_depend_on_the_other_tokens() -> None:
    keys = [noise_key(5, 0), noise_key(6, 3)]
    some = torch.tensor([70, 3, 1000])
    assert torch.equal(gumbel_noise(keys, torch.arange(2000))[1:, some], gumbel_noise(keys[1:], some))
