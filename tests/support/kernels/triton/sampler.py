"""Checks of tokens that Triton's sampler draws for a batch against those that `draw_row` draws row by row."""

import itertools
import math
import random
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from baton.modeling.forward.drawing import (
    NO_TOKEN,
    DrawKind,
    Draws,
    RowDraw,
    choose_tokens,
    draw_row,
    gumbel_noise,
    is_greedy,
    largest_tokens,
    noise_key,
)
from baton.modeling.kernels.triton.sampler import sampler
from baton.sampling_params import SamplingParams
from tests.support.models.sampling import DRAWN

SAMPLED: list[dict[str, Any]] = [{"temperature": 0.0, "top_k": 2}, {"temperature": 1e-300}, *DRAWN]
Rows = list[tuple[SamplingParams, int]]


def params_of(fields: dict[str, Any], seed: int) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **fields, "seed": seed})


def together(logits_BV: Tensor, rows: Rows, kind: DrawKind | None = None) -> list[int]:
    """Return the tokens that are drawn for the whole batch."""
    draws = [RowDraw.of(*row) for row in rows]
    kind = kind or max(draw.kind(logits_BV.shape[1]) for draw in draws)
    found: list[int] = choose_tokens(logits_BV, Draws.of(draws, logits_BV.device), kind).tolist()
    return found


def row_by_row(logits_BV: Tensor, rows: Rows) -> list[int]:
    """Return the tokens that the plain implementation draws, one row after another, on the CPU."""
    found = []
    for logits_V, (params, position) in zip(logits_BV.cpu(), rows, strict=True):
        is_largest = is_greedy(params)
        key = noise_key(params.seed, position)
        found.append(int(largest_tokens(logits_V)) if is_largest else draw_row(logits_V, params, key))
    return found


def random_logits(vocab_size: int, rng: random.Random) -> Tensor:
    """Return logits of one of several distributions: nearly equal, peaked, with few different values, partly forbidden,
    or damaged."""
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    spread, offset = rng.choice([1e-6, 0.01, 1.0, 3.0, 12.0, 60.0, 1e4]), rng.choice([0.0, 0.0, 20.0, -3e3])
    logits_V = torch.randn(vocab_size, generator=generator) * spread + offset
    quantised = rng.choice(["no", "bf16", "bf16", "few"])
    if quantised == "bf16":
        logits_V = logits_V.bfloat16().float()
    elif quantised == "few":
        logits_V = torch.randint(rng.choice([1, 2, 5, 40]), (vocab_size,), generator=generator).float()
    share = rng.choice([0.0, 0.0, 0.0, 0.5, 0.95, 1.0])
    logits_V[torch.rand(vocab_size, generator=generator) < share] = -math.inf
    if rng.random() < 0.05:
        logits_V[rng.randrange(vocab_size)] = rng.choice([math.nan, math.inf])
    return logits_V


def random_params(vocab_size: int, rng: random.Random) -> SamplingParams:
    """Return sampling parameters with any combination of filters."""
    return SamplingParams(
        temperature=rng.choice([0.0, 1e-4, 0.3, 0.8, 1.0, 1.0, 1.7, 100.0]),
        top_k=rng.choice([0, 0, 1, 2, 20, rng.randint(1, vocab_size + 3)]),
        top_p=rng.choice([1.0, 1.0, 0.5, 0.95, rng.random() + 1e-9, 1 - 1e-7, 1e-9]),
        min_p=rng.choice([0.0, 0.0, 0.0, 1.0, 0.1, rng.random() ** 8]),
        seed=rng.getrandbits(64),
    )


def check_random(seed: int, num_rows: int, vocab_size: int, device: str, **sizes: int) -> None:
    """Check a batch of random rows. `sizes`: number of parts of a row (`num_parts`) and of tokens of a tile
    (`tile_tokens`), if they are not those of the sampler."""
    rng = random.Random(seed)
    logits_BV = torch.stack([random_logits(vocab_size, rng) for _ in range(num_rows)])
    rows = [(random_params(vocab_size, rng), rng.randrange(100)) for _ in range(num_rows)]
    num_programs = num_rows * sizes["num_parts"] if "num_parts" in sizes else sampler._NUM_PROGRAMS
    tile_tokens = sizes.get("tile_tokens", sampler._TILE_TOKENS)
    with patch.multiple(sampler, _NUM_PROGRAMS=num_programs, _TILE_TOKENS=tile_tokens):
        found = together(logits_BV.to(device), rows)
    expected = row_by_row(logits_BV, rows)
    wrong = [each for each in zip(range(num_rows), rows, found, expected, strict=True) if each[2] != each[3]]
    assert not wrong, (seed, wrong)


def check_mixed(vocab_size: int, device: str) -> None:
    """Check rows of all parameters in one batch, also as a view whose rows are not adjacent."""
    generator = torch.Generator().manual_seed(vocab_size)
    rows = [(params_of(fields, 2**63 + 7 * at), at) for at, fields in enumerate(SAMPLED * 2)]
    logits_BV = 3 * torch.randn(len(rows), vocab_size + 1, generator=generator)[:, 1:]
    expected = row_by_row(logits_BV, rows)
    assert together(logits_BV.to(device), rows) == expected
    wide_BV = torch.cat((logits_BV[:, :1], logits_BV), 1).to(device)
    assert together(wide_BV[1:, 1:], rows[1:]) == expected[1:]


def check_equal(device: str) -> None:
    """Check that equal logits are kept by their ids, also if tiles and parts divide them."""
    logits_V = torch.tensor([0.0, 1.0, 1.0, 1.0, -2.0] * 1000)
    for fields in ({"top_k": 7}, {"top_k": 1500}, {"top_p": 0.3}, {"top_k": 2900, "top_p": 0.6}, {"min_p": 0.3}):
        rows = [(params_of({**fields, "temperature": 2.0}, seed), 3) for seed in range(3)]
        logits_BV = torch.stack([logits_V] * len(rows))
        assert together(logits_BV.to(device), rows) == row_by_row(logits_BV, rows), fields


def check_other_rows(device: str) -> None:
    """Check that the token of a row depends neither on other rows nor on the kind of the batch."""
    rng = random.Random(8)
    logits_BV = torch.stack([3 * torch.randn(500, generator=torch.Generator().manual_seed(row)) for row in range(6)])
    rows = [(params_of({}, seed), 1) for seed in range(5)]
    others = [(random_params(500, rng), 1) for _ in range(3)]
    drawn = together(logits_BV[:5].to(device), rows)
    for kind, other in itertools.product((DrawKind.DRAWN, DrawKind.FILTERED), (rows[0], *others)):
        if RowDraw.of(*other).kind(500) <= kind:
            assert together(logits_BV.to(device), [*rows, other], kind)[:5] == drawn


def check_without_distribution(device: str) -> None:
    """Check rows whose logits are all forbidden, or contain NaN or plus infinity, in each filter."""
    for fields in ({}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}):
        for value, token in ((math.nan, NO_TOKEN), (math.inf, NO_TOKEN), (-math.inf, 0)):
            logits_BV = torch.randn(3, 300, generator=torch.Generator().manual_seed(3))
            rows = [(params_of(fields, seed), 1) for seed in range(3)]
            whole = row_by_row(logits_BV, rows)
            logits_BV[1, slice(None) if value == -math.inf else 77] = value
            assert together(logits_BV.to(device), rows) == [whole[0], token, whole[2]], (fields, value)


def check_near_ties(device: str) -> None:
    """Check rows in which the scores of all tokens are equal except for the rounding of fp32, at several
    temperatures."""
    vocab_size, temperatures = 300, (1.0, 0.3, 1.7, 1.0)
    rows = [(params_of({"temperature": each}, seed), 2) for seed, each in enumerate(temperatures)]
    noise_BV = gumbel_noise([noise_key(params.seed, at) for params, at in rows], torch.arange(vocab_size))
    logits_BV = (-noise_BV * torch.tensor(temperatures).unsqueeze(1)).float()
    assert together(logits_BV.to(device), rows) == row_by_row(logits_BV, rows)


def check_limits_of_filters(device: str) -> None:
    """Check top-p among the tokens that top-k keeps, and tokens at both sides of min-p's limit."""
    rng, generator = random.Random(4), torch.Generator().manual_seed(4)
    logits_BV = torch.randn(24, 700, generator=generator)
    rows = [
        (params_of({"top_k": rng.randint(20, 690), "top_p": rng.uniform(0.3, 0.99)}, seed), 1) for seed in range(24)
    ]
    assert together(logits_BV.to(device), rows) == row_by_row(logits_BV, rows)
    floor = torch.tensor(math.log(0.3)).nextafter(torch.tensor(-2.0))
    near_V = [floor.nextafter(torch.tensor(0.0)), floor, floor.nextafter(torch.tensor(-2.0)), torch.tensor(-1.3)]
    logits_BV = torch.stack(near_V).unsqueeze(1).repeat(1, 100)
    logits_BV[:, 0] = 0.0
    rows = [(params_of({"min_p": 0.3}, seed), 1) for seed in range(len(near_V))]
    found = together(logits_BV.to(device), rows)
    assert found == row_by_row(logits_BV, rows) and found[-1] == 0
