"""Quest's pages and the keys of top-k, against plain sums."""

import pytest
import torch

from baton.types import TokenRange
from baton_lab.comparators.quest import PAGE_KEYS, Pages, page_scores
from baton_lab.comparators.topk import attention_weights
from generate_workers.speculation.port import DraftRequest
from generate_workers.speculation.self_drafts import SelfProposer
from tests.support.engines.draft_views import Watching, decoding, lists_of, make_view, residency_of
from tests.support.engines.generation import prompt
from tests.support.kernels.paths import needs_rows

pytestmark = needs_rows


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]))


def test_a_page_scores_what_its_best_key_could() -> None:
    q_NH, k_PIGH = random(6, 4), random(5, PAGE_KEYS, 2, 4)
    found_GP = page_scores(q_NH, torch.stack((k_PIGH.amin(1), k_PIGH.amax(1)), 1))
    for group in range(2):
        for page in range(5):
            keys = k_PIGH[page, :, group]
            most = [
                sum(
                    max(q * float(low), q * float(high)) for q, low, high in zip(q_H, *keys.aminmax(dim=0), strict=True)
                )
                for q_H in q_NH[3 * group : 3 * group + 3].tolist()
            ]
            assert found_GP[group, page] == pytest.approx(sum(most) / 2, rel=1e-5)  # 1 / sqrt(H), which orders nothing
            assert sum(most) >= (keys @ q_NH[3 * group : 3 * group + 3].T).amax(0).sum() - 1e-5


def test_weights_are_those_of_a_softmax_summed_over_the_heads_of_a_kv_head() -> None:
    q_NH, k_SGH = random(6, 4), random(9, 2, 4)
    found_GS = attention_weights(q_NH, k_SGH)
    for group in range(2):
        expected_S = sum((k_SGH[:, group] @ q_H / 2).softmax(0) for q_H in q_NH[3 * group : 3 * group + 3])
        torch.testing.assert_close(found_GS[group], expected_S)


def test_pages_follow_a_row_and_keep_what_keys_there_are() -> None:
    with decoding([prompt(50)]) as (made, rows):
        pages, residency, (row,) = Pages(made.decoder.layout, row_tokens := 90), residency_of(made), rows
        assert pages.data_LP2GH.shape[1] == row_tokens // PAGE_KEYS
        for num_pages in (3, 3, 4):
            while row.num_cached < num_pages * PAGE_KEYS:
                made.engine.step()
            pages.follow(residency, row.slot, row.num_cached)
            assert pages.num == num_pages
        for at in range(2):
            keys = residency.kv(row.slot, 2 + at, TokenRange(0, 64))[:, 0].view(4, PAGE_KEYS, 2, -1)
            assert torch.equal(pages.data_LP2GH[at, :4], torch.stack((keys.amin(1), keys.amax(1)), 1))


def test_quest_takes_whole_pages_and_the_latest_keys_within_its_budget() -> None:
    with decoding([prompt(70)]) as (made, rows):
        watching = Watching(make_view("quest", made, 54), residency_of(made))
        SelfProposer(made.decoder, watching, [24]).draft([DraftRequest(rows[0], 3)])
    for index, step in enumerate(watching.found):
        assert [layer for layer, picks in step.items() if picks is None] == [0, 1]
        for layer in (2, 3):
            picks = step[layer]
            assert picks is not None
            for keys in lists_of(picks)[0]:
                chosen = [keys[at : at + PAGE_KEYS] for at in (0, PAGE_KEYS)]
                assert [each[0] % PAGE_KEYS for each in chosen] == [0, 0]
                assert all(each == list(range(each[0], each[0] + PAGE_KEYS)) for each in chosen)
                assert keys[2 * PAGE_KEYS :] == list(range(64, 71 + index))
