"""A forward over rows in pages: that over rows in one piece."""

import pytest
import torch

from baton.modeling.forward.decoder import Decoder
from baton.modeling.kv.buffers import BufferSpan
from baton.modeling.kv.pages import PageSpan
from baton.types import TokenRange
from tests.support.kernels.paged_rows import in_pages
from tests.support.models.tiny_models import random_decoder
from tests.support.paths import filled

LENGTHS = (3, 40, 17, 130)
PAGE = 16


def check(decoder: Decoder, num_new: int, most_queries: int) -> None:
    """New tokens of all rows have the same hidden states and KV."""
    buffers = filled(decoder, LENGTHS, num_new)
    rows = in_pages(buffers, PAGE)
    news = [TokenRange(len(each.tokens) - num_new, len(each.tokens)) for each in buffers]
    ids = torch.randint(90, (num_new * len(buffers),), generator=torch.Generator().manual_seed(9)).tolist()
    plain = [BufferSpan(each, new) for each, new in zip(buffers, news, strict=True)]
    paged = [PageSpan(row, new) for row, new in zip(rows, news, strict=True)]
    expected_TD = decoder.forward(ids, plain, most_queries=most_queries)
    got_TD = decoder.forward(ids, paged, most_queries=most_queries)
    if num_new <= most_queries and decoder.config.head_dim % 16 == 0:
        assert torch.equal(got_TD, expected_TD)
    else:  # pieces of keys are merged in another order
        torch.testing.assert_close(got_TD, expected_TD, atol=2e-5, rtol=2e-5)
    for buffer, row in zip(buffers, rows, strict=True):
        for layer in range(decoder.layout.num_layers):
            for part, kv_T2GH in row.spans(layer, buffer.tokens):
                torch.testing.assert_close(kv_T2GH, buffer.span(layer, part), atol=2e-5, rtol=2e-5)


@torch.inference_mode()
@pytest.mark.parametrize(("num_new", "most_queries"), [(1, 1), (4, 8)])
def test_rows_of_one_call_have_the_same_bits(num_new: int, most_queries: int) -> None:
    decoder = random_decoder(dtype="bfloat16", head_dim=64, num_layers=3)
    check(decoder, num_new, most_queries)


@torch.inference_mode()
@pytest.mark.parametrize("num_new", [1, 5, 40])
@pytest.mark.parametrize("head_dim", [8, 16])
def test_longer_spans_are_attended_to_piece_by_piece(num_new: int, head_dim: int) -> None:
    """New tokens may lie in several pages that are not adjacent; there is no kernel for rows of head dim 8."""
    check(random_decoder(num_layers=2, head_dim=head_dim), num_new, 1)
