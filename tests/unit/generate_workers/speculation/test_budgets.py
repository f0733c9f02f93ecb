"""Rows of one round may draft over different numbers of keys, by what brings each of them most."""

import dataclasses

import numpy as np

from baton.planning.speculation import MOST_DRAFTS
from baton.planning.work_cost import WorkCost
from baton.sampling_params import SamplingParams
from generate_workers.residency.port import DraftKeys
from generate_workers.speculation.port import DraftRequest
from generate_workers.speculation.self_drafts import SelfProposer
from generate_workers.speculation.streaming_view import StreamingView
from tests.support.engines.draft_views import decoding, residency_of
from tests.support.engines.generation import harness, prompt
from tests.unit.generate_workers.speculation.test_rounds import answers

BUDGETS = (32, 16, 64)
READING = WorkCost(step_s=1e-5, token_s=1e-6, key_s=1e-5, pair_s=0.0)
"""Costs of a machine that only reads keys: fewer keys pay, and so do many drafts."""
PARAMS = SamplingParams(max_tokens=40, temperature=0.8, seed=3, ignore_eos=True)


def test_each_row_drafts_over_its_own_number_of_keys() -> None:
    with decoding([prompt(80), prompt(87, seed=1)]) as (made, rows):

        def drafts(first: int, second: int) -> list[list[int]]:
            view = StreamingView(residency_of(made), DraftKeys.of(BUDGETS[0], MOST_DRAFTS))
            draft_requests = [DraftRequest(row, 6, num) for row, num in zip(rows, (first, second), strict=True)]
            return [draft.token_ids for draft in SelfProposer(made.decoder, view, BUDGETS).draft(draft_requests)]

        few, many = drafts(4, 4), drafts(64, 64)
        assert few != many  # so it matters how many there are
        assert drafts(4, 64) == [few[0], many[1]]
        assert drafts(64, 4) == [many[0], few[1]]


def test_a_row_is_offered_what_tells_its_keys_apart() -> None:
    with decoding([prompt(12), prompt(24), prompt(48), prompt(80)]) as (made, rows):
        view = StreamingView(residency_of(made), DraftKeys.of(BUDGETS[0], MOST_DRAFTS))
        proposer = SelfProposer(made.decoder, view, BUDGETS)
        offers = proposer.offers(rows, np.array([row.num_known for row in rows]), np.full(len(rows), 4))
    assert offers.num_keys.tolist() == [[32, 16, 64]] * 4
    assert offers.kinds.tolist() == [[0, 1, 2]] * 4
    assert offers.num_drafts.tolist() == [[4, 0, 0], [4, 4, 0], [4, 4, 4], [4, 4, 4]]


def test_planned_numbers_of_keys_change_no_text() -> None:
    asked = [([3 + index, *range(4, 60)], dataclasses.replace(PARAMS, seed=index)) for index in range(5)]
    plain, _ = answers(asked, "off", max_slot_tokens=128)
    planned, _ = answers(asked, "streaming", max_slot_tokens=128, draft_tokens=0, draft_keys=32, cost=READING)
    assert planned == plain


def test_drafts_are_made_over_other_numbers_of_keys_than_configured() -> None:
    with harness(speculation="streaming", draft_tokens=0, draft_keys=32, cost=READING) as made:
        made.submit(prompt(80), PARAMS)
        made.run()
        status = made.engine.status()
    assert status.speculation is not None
    assert status.speculation.num_drafted > 0
    (source,) = made.engine._speculation._sources.values()  # type: ignore[union-attr]
    assert source.acceptances._all_M[:, 1].sum() > 0  # half of the configured number of keys
