"""baton.modeling.forward.drawing: rows that a batch draws at once get the tokens that each gets alone, by the host."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.modeling.forward.drawing import NO_TOKEN, DrawKind, Draws, RowDraw, choose_by_rows, choose_tokens, draw_row
from baton.sampling_params import SamplingParams
from tests.support.models.sampling import DRAWN, make, normal_logits

SAMPLED: list[dict[str, Any]] = [{"temperature": 0.0, "top_k": 2}, {"temperature": 1e-300}, *DRAWN]


def params_of(fields: dict[str, Any], seed: int) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **fields, "seed": seed})


def together(logits_BV: Tensor, rows: list[tuple[SamplingParams, int]]) -> list[int]:
    draws = [RowDraw.of(*row) for row in rows]
    kind = max(draw.kind(logits_BV.shape[1]) for draw in draws)
    found: list[int] = choose_tokens(logits_BV, Draws.of(draws, logits_BV.device), kind).tolist()
    return found


@pytest.mark.parametrize("vocab_size", [3, 97, 5000])
def test_a_batch_draws_what_each_row_draws(vocab_size: int) -> None:
    rows = [(params_of(fields, 2**63 + 7 * at), at) for at, fields in enumerate(SAMPLED * 4)]
    logits_BV = torch.stack([normal_logits(vocab_size, row) for row in range(len(rows))])
    assert together(logits_BV, rows) == choose_by_rows(logits_BV, rows)


@pytest.mark.parametrize("fields", SAMPLED)
def test_equal_logits_are_kept_by_their_ids(fields: dict[str, Any]) -> None:
    logits_BV = torch.tensor([[0.0, 1.0, 1.0, 1.0, -2.0] * 20] * 50)
    rows = [(params_of(fields, seed), 3) for seed in range(50)]
    assert together(logits_BV, rows) == choose_by_rows(logits_BV, rows)


def test_rows_of_other_kinds_change_no_token() -> None:
    logits_BV = torch.stack([normal_logits(500, row) for row in range(6)])
    rows = [(params_of({}, seed), 1) for seed in range(5)]
    drawn = together(logits_BV[:5], rows)
    assert together(logits_BV, [*rows, (params_of({"top_k": 3}, 9), 1)])[:5] == drawn
    assert together(logits_BV, [*rows, (params_of({"temperature": 0.0}, 9), 1)])[:5] == drawn


def test_a_row_whose_every_token_is_forbidden_still_gets_one() -> None:
    logits_BV = torch.full((2, 50), -torch.inf)
    rows = [(params_of({"top_p": 0.5}, 1), 0), (params_of({}, 1), 0)]
    assert together(logits_BV, rows) == [0, 0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("fields", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}])
def test_a_row_with_a_logit_that_is_not_finite_gets_no_token(fields: dict[str, Any], value: float) -> None:
    logits_BV = torch.stack([normal_logits(300, row) for row in range(3)])
    rows = [(params_of(fields, seed), 1) for seed in range(3)]
    whole = together(logits_BV, rows)
    assert choose_by_rows(logits_BV, rows) == whole
    logits_BV[1, 77] = value
    broken = [whole[0], NO_TOKEN, whole[2]]
    assert (together(logits_BV, rows), choose_by_rows(logits_BV, rows)) == (broken, broken)
    assert fields.get("temperature") == 0.0 or draw_row(logits_BV[1], rows[1][0], 5) == NO_TOKEN


def test_kinds_of_draws() -> None:
    def kind(**fields: Any) -> DrawKind:
        return RowDraw.of(params_of(fields, 0), 0).kind(100)

    assert kind(temperature=0.0, top_k=5) is DrawKind.GREEDY
    assert kind() is kind(top_k=100) is DrawKind.DRAWN
    assert kind(top_k=99) is kind(top_p=0.9) is kind(min_p=0.1) is DrawKind.FILTERED


def test_a_state_says_when_its_logits_have_to_be_seen_by_the_host() -> None:
    assert make(top_p=0.9, stop_token_ids=(2,)).row_draw() == RowDraw.of(params_of({"top_p": 0.9}, 0), 3)
    for fields in (
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": {1: 1.0}},
        {"logprobs": 0},
        {"min_tokens": 4},
    ):
        assert make(**fields).row_draw() is None, fields
    assert make(min_tokens=3).row_draw() is not None, "min_tokens is reached"
    assert make(min_tokens=4, ignore_eos=True).row_draw() is not None, "no token is forbidden"
