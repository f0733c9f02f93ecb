"""Checks of decode attention by Triton's kernels against the kernels in C++, over the same pages."""

import torch

from baton.modeling.forward.decode_rows import DecodeRows
from baton.modeling.forward.selection import Picks
from baton.modeling.forward.triton.attention import triton_kernel
from baton.modeling.forward.triton.triton_rows import TritonRows, compile_rows
from baton.modeling.kernels.triton.row_kernels import StepRows
from baton.modeling.kv.buffers import BufferSpan, KvBuffer
from baton.modeling.kv.pages import PageSpan
from baton.types import KvLayout, TokenRange
from tests.support.kernels.paged_rows import in_pages
from tests.support.models.tiny_models import random_decoder

LENGTHS = (9, 64, 17, 200)
TOLERANCE = 2e-5
PAGE_TOKENS = 16


def check_rows(
    num_new: int, page_tokens: int, window: int | None, unseen: TokenRange | None, *, has_picks: bool, in_order: bool
) -> None:
    """Check sequences of LENGTHS tokens with `num_new` queries each, in a step with one additional token that belongs
    to no sequence."""
    layout = KvLayout("test", 2, 2, 32, "float32")
    generator = torch.Generator().manual_seed(page_tokens)
    buffers = [KvBuffer(layout, TokenRange(0, length)) for length in LENGTHS]
    for each in buffers:
        each.data.copy_(torch.randn(each.data.shape, generator=generator))
    pages = in_pages(buffers, page_tokens), in_pages(buffers, page_tokens, seed=2)
    first = 0 if in_order else 1
    spans = []
    for rows in pages:
        places = [PageSpan(row, TokenRange(n - num_new, n)).place() for row, n in zip(rows, LENGTHS, strict=True)]
        places = [type(each)(**(vars(each) | {"unseen": unseen})) for each in places]
        spans.append([(first + index * num_new, place) for index, place in enumerate(places)])
    windows = (None, window)
    ours, theirs = TritonRows(spans[0], windows), DecodeRows(spans[1], layout.row_bytes, windows)
    num_tokens = len(LENGTHS) * num_new + 1
    q_TNH = torch.randn(num_tokens, 6, 32, generator=generator)
    k_TGH, v_TGH = torch.randn(2, num_tokens, 2, 32, generator=generator)
    picks = Picks(torch.tensor([0, 3, 8]).int().expand(4, 2, 3).contiguous(), torch.full((4, 2), 3).int())
    for layer in range(2):
        ours.append(layer, k_TGH, v_TGH)
        theirs.append(layer, k_TGH, v_TGH)
        for row, other, length in zip(*pages, LENGTHS, strict=True):
            for (_, kv_T2GH), (_, other_T2GH) in zip(
                row.spans(layer, TokenRange(0, 1)), other.spans(layer, TokenRange(0, 1)), strict=True
            ):
                assert torch.equal(kv_T2GH, other_T2GH)
            tail = TokenRange(length - num_new, length)
            got = torch.cat([kv for _, kv in row.spans(layer, tail)])
            assert torch.equal(got, torch.cat([kv for _, kv in other.spans(layer, tail)]))
        expected_BNH = theirs.attend(layer, q_TNH, 2)
        torch.testing.assert_close(ours.attend(layer, q_TNH, 2), expected_BNH, atol=TOLERANCE, rtol=TOLERANCE)
    if has_picks:
        for index, buffer in enumerate(buffers):
            plain = DecodeRows(
                [(0, BufferSpan(buffer, TokenRange(buffer.tokens.end - 1, buffer.tokens.end)).place())],
                layout.row_bytes,
                (None, None),
            )
            plain.append(0, k_TGH[first + index :][:1], v_TGH[first + index :][:1])
            one = Picks(picks.keys_BGK[:1], picks.num_BG[:1])
            expected_1NH = plain.attend(0, q_TNH[first + index :][:1], 2, one)
            got_1NH = ours.attend(0, q_TNH, 2, picks)[index : index + 1]
            torch.testing.assert_close(got_1NH, expected_1NH, atol=TOLERANCE, rtol=TOLERANCE)


def step_rows(num_new: int, lengths: tuple[int, ...]) -> StepRows:
    """Return the kernels' description of a step with sequences of the given lengths and `num_new` queries each."""
    layout = KvLayout("test", 1, 1, 16, "float32")
    rows = in_pages([KvBuffer(layout, TokenRange(0, length)) for length in lengths], PAGE_TOKENS)
    places = [PageSpan(row, TokenRange(n - num_new, n)).place() for row, n in zip(rows, lengths, strict=True)]
    made = TritonRows([(index * num_new, place) for index, place in enumerate(places)], (None,))
    return made._pools[0].rows


def check_compiling() -> None:
    """Check that compiling runs all kernels once and leaves the pages unchanged."""
    pages_LPS2GH = torch.randn(2, 3, PAGE_TOKENS, 2, 2, 16)
    before = pages_LPS2GH.clone()
    compile_rows(pages_LPS2GH, 4, (None, 8), (1, 2, 4))
    assert torch.equal(pages_LPS2GH, before)


@torch.inference_mode()
def check_forward() -> None:
    """Check that a decoder gives the same hidden states with Triton's kernels as with the kernels in C++."""
    plain, ours = random_decoder(), random_decoder()
    ours._has_native_rows, ours.has_triton_rows, ours.fused, ours.kernel = False, True, None, triton_kernel
    hidden = []
    for decoder in (plain, ours):
        buffers = [KvBuffer(decoder.layout, TokenRange(0, length)) for length in LENGTHS]
        for seed, each in enumerate(buffers):
            each.data.copy_(torch.randn(each.data.shape, generator=torch.Generator().manual_seed(seed)))
        rows = in_pages(buffers, 16)
        news = (1, 3, 12, 2)
        spans = [PageSpan(row, TokenRange(n - new, n)) for row, n, new in zip(rows, LENGTHS, news, strict=True)]
        hidden.append(decoder.forward(list(range(sum(news))), spans, most_queries=4))
    torch.testing.assert_close(hidden[0], hidden[1], atol=1e-4, rtol=1e-4)
