"""baton.modeling.forward.drawing: kinds of draws, and rows without a distribution."""

import math
from typing import Any

import pytest
import torch

from baton.modeling.forward.drawing import NO_TOKEN, DrawKind, RowDraw, choose_by_rows, draw_row
from baton.sampling_params import SamplingParams
from tests.support.models.sampling import make, normal_logits


def params_of(fields: dict[str, Any], seed: int) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **fields, "seed": seed})


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("fields", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}])
def test_a_row_with_a_logit_that_is_not_finite_gets_no_token(fields: dict[str, Any], value: float) -> None:
    logits_BV = torch.stack([normal_logits(300, row) for row in range(3)])
    rows = [(params_of(fields, seed), 1) for seed in range(3)]
    whole = choose_by_rows(logits_BV, rows)
    logits_BV[1, 77] = value
    assert choose_by_rows(logits_BV, rows) == [whole[0], NO_TOKEN, whole[2]]
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
        {"min_tokens": 4},
    ):
        assert make(**fields).row_draw() is None, fields
    assert make(logprobs=2).row_draw() == RowDraw.of(params_of({}, 0), 3)._replace(num_top=2)
    assert make(min_tokens=3).row_draw() is not None, "min_tokens is reached"
    assert make(min_tokens=4, ignore_eos=True).row_draw() is not None, "no token is forbidden"
