"""Rounds of drafts: tokens carry them, the engine counts them by source, requests say how many they want."""

from typing import Any

import pytest

from baton.planning.work_cost import WorkCost
from baton.results.timings import DraftCounts
from baton.sampling_params import SamplingParams
from baton.types import DraftRound, FinishReason
from generate_workers.engine.speculation import SpeculationStats
from tests.support.engines.generation import Collector, Harness, harness, prompt

ALL_KEYS = 128
"""With drafts over all keys, every draft is accepted."""


def params(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=3, ignore_eos=True, **options)


def rounds_of(stream: Collector) -> list[DraftRound]:
    return [event.drafts for event in stream.events if event.drafts is not None]


def stats(made: Harness) -> SpeculationStats:
    found = made.engine.status().speculation
    assert found is not None
    return found


def test_the_last_token_of_a_round_tells_what_was_verified() -> None:
    """One token by the step that prefills, then rounds of three drafts and one more token."""
    with harness(speculation="streaming", draft_keys=ALL_KEYS) as made:
        stream = made.answer(prompt(12), params(1 + 4 * 3))
    told = [event.drafts for event in stream.events]
    whole = DraftRound("streaming", num_drafts=3, num_accepted=3, num_tokens=4)
    assert told == [None, *[None, None, None, whole] * 3]


def test_a_choice_that_ends_with_a_draft_tells_its_last_round() -> None:
    with harness(speculation="streaming", draft_keys=ALL_KEYS) as made:
        whole = made.answer(prompt(12), params(9)).token_ids
        cut = made.answer(prompt(12), params(9, stop_token_ids=(whole[6],)))
    at = whole.index(whole[6])
    assert cut.finish is FinishReason.STOP and cut.token_ids == whole[: at + 1]
    place = (at - 1) % 4 + 1  # of the token in its round, from 1
    assert rounds_of(cut)[-1] == DraftRound("streaming", 3, min(place, 3), place)
    assert sum(each.num_tokens for each in rounds_of(cut)) == len(cut.token_ids) - 1


def test_streams_and_the_engine_count_alike() -> None:
    """Counts are by source. Drafts that see few keys are rejected at times."""
    with harness(speculation="auto", draft_keys=6, num_slots=8) as made:
        greedy = SamplingParams(max_tokens=70, temperature=0.0, ignore_eos=True)
        streams = [made.submit(prompt(20 + index), greedy)[1] for index in range(6)]
        made.run()
        said = {each.counts.source: each for each in stats(made).sources}
        total = stats(made).num_drafted, stats(made).num_accepted
    told = {name: DraftCounts(name) for name in ("ngram", "streaming")}
    for each in (each for stream in streams for each in rounds_of(stream)):
        told[each.source] += DraftCounts.of(each)
        assert each.num_accepted <= each.num_tokens <= each.num_accepted + 1
    assert {name: each.counts for name, each in said.items()} == told
    assert all(0 < each.num_accepted < each.num_drafted for each in told.values()), told
    assert total == (sum(each.num_drafted for each in told.values()), sum(each.num_accepted for each in told.values()))
    assert {name: each.draft_keys for name, each in said.items()} == {"ngram": 0, "streaming": 6}


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_a_request_says_how_many_drafts_it_wants(draft_tokens: int) -> None:
    """Whatever the engine would choose; the texts are the same."""
    asked = (0, 1, 5)
    with harness(speculation="streaming", draft_keys=ALL_KEYS, draft_tokens=draft_tokens) as made:
        streams = [made.submit(prompt(12), params(1 + 4 * 6, num_drafts=num))[1] for num in asked]
        made.run()
    for num, stream in zip(asked, streams, strict=True):
        assert stream.token_ids == streams[0].token_ids
        assert all(each.num_drafts == num for each in rounds_of(stream)[:-1])
        assert len(rounds_of(stream)) == (24 // (1 + num) if num else 0)


def test_rounds_are_predicted_by_the_work_of_their_steps() -> None:
    """Predicted by the costs that the engine was given; it learns no others on this clock, even with fixed drafts."""
    cost = WorkCost(step_s=1000.0, token_s=10.0, key_s=0.1, pair_s=0.01)
    with harness(speculation="streaming", draft_keys=8, cost=cost) as made:
        made.submit(prompt(30), params(1 + 4))
        predicted = []
        while not made.streams[0].ended.is_set():
            made.engine.step()
            last = made.engine.status().last_step
            assert last is not None
            if last.num_drafts:
                assert last.predicted_s == stats(made).predicted_s
                predicted.append(last.predicted_s)
    drafting, verifying = 3 * (1000 + 10 + 8 * 0.1), 1000 + 4 * 10 + 31 * 0.1 + 3 * 31 * 0.01
    assert predicted[0] == pytest.approx(drafting + verifying)


def test_planned_drafts_follow_the_costs_that_were_measured() -> None:
    """Where steps cost nothing but reading keys, drafts over few keys pay; where only steps cost, they do not."""

    def num_drafted(cost: WorkCost) -> int:
        with harness(speculation="streaming", draft_keys=8, draft_tokens=0, cost=cost) as made:
            made.answer(prompt(100), params(12))
            return stats(made).num_drafted

    assert num_drafted(WorkCost(0.0, 0.0, 1.0, 0.0)) > 0
    assert num_drafted(WorkCost(1.0, 0.0, 0.0, 0.0)) == 0
