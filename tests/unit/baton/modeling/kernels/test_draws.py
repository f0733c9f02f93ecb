"""Tokens drawn by the kernel in C++, against those that torch's operations draw, token by token."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.modeling.forward.drawing import NO_TOKEN, Draws, RowDraw, draw_row, largest_tokens, noise_key
from baton.modeling.kernels import native
from baton.modeling.kernels.calls.operators import Operators
from baton.sampling_params import SamplingParams
from tests.support.kernels.paths import require, sets
from tests.support.models.sampling import DRAWN

ROWS = [
    (SamplingParams(**{"temperature": 1.0, **fields, "seed": 2**63 + 7 * at}), at)
    for at, fields in enumerate(DRAWN * 3)
]
SPREADS = (0.01, 1.0, 4.0, 40.0)
"""Standard deviations of logits: nearly equal ones to those of which one has all probability."""
VOCABULARIES = (1, 3, 17, 97, 5000, 49152)
SETS = sets()


@pytest.fixture(params=SETS)
def operators(request: pytest.FixtureRequest) -> Operators:
    require(request.param)
    return native.operators(request.param)


def drawn(operators: Operators, logits_BV: Tensor, rows: list[tuple[SamplingParams, int]]) -> list[int]:
    draws = Draws.of([RowDraw.of(*row) for row in rows], logits_BV.device)
    found: list[int] = operators.draw_tokens(logits_BV, torch.arange(len(rows)), draws).tolist()
    return found


def expected(logits_BV: Tensor, rows: list[tuple[SamplingParams, int]]) -> list[int]:
    keys = [noise_key(params.seed, position) for params, position in rows]
    return [draw_row(logits_V, row[0], key) for logits_V, row, key in zip(logits_BV, rows, keys, strict=True)]


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("spread", SPREADS)
def test_tokens_are_those_of_torch(operators: Operators, spread: float, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits_BV = spread * torch.randn(len(ROWS), vocab_size + 5, generator=generator)[:, :vocab_size]
    assert drawn(operators, logits_BV, ROWS) == expected(logits_BV, ROWS)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_the_largest_are_those_of_torch(operators: Operators, vocab_size: int) -> None:
    logits_BV = torch.randn(9, vocab_size + 5)[:, :vocab_size]
    logits_BV[1] = logits_BV[1].round()  # many are equal: the first is taken
    logits_BV[2], logits_BV[3, vocab_size // 2] = -math.inf, math.inf
    logits_BV[4, vocab_size // 3 :: 2] = math.nan
    logits_BV[5, -1], logits_BV[6, 0] = 99.0, 99.0
    found_B = operators.largest_tokens(logits_BV)
    assert torch.equal(found_B, largest_tokens(logits_BV))
    assert (found_B == NO_TOKEN).nonzero().flatten().tolist() == [3, 4]
    with pytest.raises(RuntimeError, match=r"logits must be \[B, V\], float32"):
        operators.largest_tokens(logits_BV.double())


@pytest.mark.parametrize("fields", DRAWN)
def test_equal_logits_are_kept_by_their_ids(operators: Operators, fields: dict[str, Any]) -> None:
    logits_BV = torch.tensor([[0.0, 1.0, 1.0, 1.0, -2.0] * 20] * 50)
    rows = [(SamplingParams(**{"temperature": 1.0, **fields, "seed": seed}), 3) for seed in range(50)]
    assert drawn(operators, logits_BV, rows) == expected(logits_BV, rows)


def test_forbidden_tokens_are_not_drawn(operators: Operators) -> None:
    logits_BV = torch.full((len(ROWS), 300), -math.inf)
    logits_BV[:, 7], logits_BV[:, 288] = 1.0, 0.5
    found = drawn(operators, logits_BV, ROWS)
    assert found == expected(logits_BV, ROWS)
    assert set(found) == {7, 288}


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("at", [0, 40, 48])
def test_what_is_no_distribution_has_no_token(operators: Operators, value: float, at: int) -> None:
    logits_BV = torch.randn(len(ROWS), 49)
    if value == -math.inf:
        logits_BV[:] = value
    logits_BV[:, at] = value
    assert drawn(operators, logits_BV, ROWS) == [-1] * len(ROWS)


def test_rows_are_drawn_by_their_numbers(operators: Operators) -> None:
    logits_BV, rows = torch.randn(5, 400), ROWS[:2]
    draws = Draws.of([RowDraw.of(*row) for row in rows], logits_BV.device)
    found = operators.draw_tokens(logits_BV, torch.tensor([4, 1]), draws).tolist()
    assert found == expected(logits_BV[[4, 1]], rows)


def test_what_does_not_fit_together_is_refused(operators: Operators) -> None:
    draws = Draws.of([RowDraw.of(*ROWS[0])], torch.device("cpu"))
    logits_BV, row = torch.randn(2, 9), torch.tensor([0])
    with pytest.raises(RuntimeError, match=r"row 2 is not among the logits"):
        operators.draw_tokens(logits_BV, torch.tensor([2]), draws)
    with pytest.raises(RuntimeError, match=r"logits must be \[B, V\], float32"):
        operators.draw_tokens(logits_BV.double(), row, draws)
    with pytest.raises(RuntimeError, match="top_p must be torch.float64"):
        operators.draw_tokens(logits_BV, row, draws._replace(top_p_B=draws.top_p_B.float()))
