"""Partial keys that follow a row of drafts, and the budget that bounds a prepared selection."""

import math

import torch

from baton.modeling.forward.selection import Selection
from baton.types import TokenRange
from generate_workers.speculation.infinigen_view import InfinigenView, at_most
from generate_workers.speculation.port import DraftRequest
from generate_workers.speculation.self_drafts import SelfProposer
from tests.support.engines.draft_views import decoding, make_view, residency_of
from tests.support.engines.generation import prompt
from tests.support.kernels.paths import needs_rows

pytestmark = needs_rows


def test_partial_keys_are_those_of_the_row_s_keys_and_drafts_among_them_are_given_up() -> None:
    with decoding([prompt(40)]) as (made, rows):
        view, (row,), residency = make_view("infinigen", made, 16), rows, residency_of(made)
        proposer = SelfProposer(made.decoder, view, [24])
        assert isinstance(view, InfinigenView)
        index, basis = view._residency.indices[row.slot], view._residency.prepared.basis

        def check(num_tokens: int) -> None:
            for layer in index.layers:
                keys = residency.kv(row.slot, layer, TokenRange(0, num_tokens))[:, 0]
                expected = basis.keys(layer, keys).bfloat16()
                torch.testing.assert_close(index.read(layer, num_tokens), expected, atol=1e-2, rtol=1e-2)

        for _ in range(5):
            proposer.draft([DraftRequest(row, 4)])
            check(row.num_cached + 4)
            made.engine.step()
        view.begin([row])
        check(row.num_cached)


def test_a_budget_bounds_a_prepared_selection() -> None:
    found = at_most(100, Selection(4.0, 0.5, 4, 8, free_keys=7))
    assert [found.most_by_score(num) for num in (10, 1000, 10**6)] == [88, 88, 88]
    assert at_most(8, Selection(4.0, 0.5, 4, 8)).most_by_score(1000) == 1
    assert math.isclose(found.alpha, 4.0)
