"""Picks of rows that attend to different numbers of keys."""

import torch

from baton_lab.comparators.ragged import picks_of
from tests.support.engines.draft_views import lists_of


def test_rows_of_uneven_numbers_are_padded() -> None:
    rows = [[[1, 4, 6], [0, 2, 6]], [[3], [5]]]
    picks = picks_of([torch.tensor(each, dtype=torch.int32) for each in rows])
    assert lists_of(picks) == rows
    assert picks.keys_BGK.shape == (2, 2, 3)
    assert picks.keys_BGK.dtype == picks.num_BG.dtype == torch.int32
    assert picks.keys_BGK.is_contiguous()
    assert picks.num_BG.is_contiguous()
