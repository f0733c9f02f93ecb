"""The best keys by scores, with ties, infinities and NaN; queries by kv head."""

import math

import pytest
import torch

from generate_workers.speculation.choosing import by_kv_head, top_keys


@pytest.mark.parametrize("num_keys", [0, 1, 5, 17, 40])
def test_the_largest_scores_win_and_of_equals_the_earlier_key(num_keys: int) -> None:
    scores_GS = torch.randint(4, (3, 40), generator=torch.Generator().manual_seed(num_keys)).float()
    scores_GS[0, 7], scores_GS[1, 9], scores_GS[2, :4] = math.inf, -math.inf, math.nan
    found_GK = top_keys(scores_GS, num_keys)
    assert (found_GK.dtype, found_GK.shape) == (torch.int32, (3, num_keys))
    for scores, found in zip(scores_GS.nan_to_num(-math.inf, math.inf, -math.inf).tolist(), found_GK, strict=True):
        best = sorted(range(40), key=lambda key, scores=scores: (-scores[key], key))[:num_keys]  # type: ignore[misc]
        assert found.tolist() == sorted(best)


def test_queries_are_put_to_the_kv_head_that_they_share() -> None:
    q_TNH = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(0))
    q_GJTH = by_kv_head(q_TNH, 2)
    assert q_GJTH.shape == (2, 3, 5, 4)
    assert torch.equal(q_GJTH[1, 2, 4], q_TNH[4, 5] / 2)
