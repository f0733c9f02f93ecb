"""Checks of attention over pages by Triton's kernels against the kernels in C++, over the same pages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from baton.modeling.forward.decode_rows import DecodeRows
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.selection import Picks
from baton.modeling.forward.triton.attention import triton_kernel
from baton.modeling.forward.triton.triton_rows import TritonRows
from baton.modeling.kv.buffers import BufferSpan, KvBuffer, KvPlace, KvRows
from baton.modeling.kv.pages import PageSpan, RowPages
from baton.types import KvLayout, TokenRange
from tests.support.kernels.paged_rows import in_pages
from tests.support.models.tiny_models import random_decoder

LENGTHS = (9, 64, 17, 200)
TOLERANCE = 2e-5


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
    ours, theirs = TritonRows(spans[0], windows, 3), DecodeRows(spans[1], layout.row_bytes, windows)
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
        found_BNH, expected_BNH = ours.attend(layer, q_TNH, 2)[theirs.tokens_B], theirs.attend(layer, q_TNH, 2)
        torch.testing.assert_close(found_BNH, expected_BNH, atol=TOLERANCE, rtol=TOLERANCE)
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
            got_1NH = ours.attend(0, q_TNH, 2, picks)[first + index :][:1]
            torch.testing.assert_close(got_1NH, expected_1NH, atol=TOLERANCE, rtol=TOLERANCE)


@dataclass(frozen=True)
class TwoPools:
    """Span whose first layers are in one pool of pages, and whose other layers are in another pool."""

    first: PageSpan
    others: PageSpan

    @property
    def tokens(self) -> TokenRange:
        return self.first.tokens

    def own(self, layer: int) -> Tensor:
        raise AssertionError("kernels write the KV of spans in pages")

    def segments(self, layer: int) -> Iterator[KvRows]:
        raise AssertionError("kernels read the KV of spans in pages")

    def place(self) -> KvPlace:
        return replace(self.first.place(), others=self.others.place())


@torch.inference_mode()
def check_forward(window: int | None) -> None:
    """Check that a decoder gives the same hidden states and KV with Triton's kernels as with the kernels in C++, in
    steps with new tokens of all kinds: one, few, a later chunk of a prompt, and whole prompts. The KV of a second pass
    is in two pools."""
    shape = {"num_layers": 3, "window": window}
    plain, ours = random_decoder(**shape), random_decoder(**shape)  # type: ignore[arg-type]
    ours._has_native_rows, ours.has_triton_rows, ours.fused, ours.kernel = False, True, None, triton_kernel
    news = (1, 33, 17, 150)
    ids = list(range(sum(news)))
    ids = [token % 90 for token in ids]
    expected_TD, kv = _forward(plain, plain.layout, ids, news)
    found_TD, own = _forward(ours, ours.layout, ids, news)
    torch.testing.assert_close(found_TD, expected_TD, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(own, kv, atol=1e-4, rtol=1e-4)
    layouts = [replace(ours.layout, num_layers=number) for number in (1, 2)]
    again_TD, halves = _forward(ours, layouts[0], ids, news, layouts[1])
    assert torch.equal(again_TD, found_TD) and torch.equal(halves, own)


def _forward(
    decoder: Decoder, layout: KvLayout, ids: Sequence[int], news: Sequence[int], others: KvLayout | None = None
) -> tuple[Tensor, Tensor]:
    """Run one step of sequences with `news` new tokens and LENGTHS keys. Return the hidden states, and the KV of all
    sequences. `others`: layout of the second pool, or None."""
    rows, start = [], 0
    for each in (layout, others) if others is not None else (layout,):
        buffers = [KvBuffer(each, TokenRange(0, length)) for length in LENGTHS]
        for row, buffer in enumerate(buffers):
            whole = torch.randn(3, *buffer.data.shape[1:], generator=torch.Generator().manual_seed(row))
            buffer.data.copy_(whole[start : start + each.num_layers])
        rows.append(in_pages(buffers, 16, seed=start))
        start += each.num_layers
    pairs = zip(LENGTHS, news, strict=True)
    tokens = [TokenRange(length - new, length) for length, new in pairs]
    spans: list[Any] = [PageSpan(row, part) for row, part in zip(rows[0], tokens, strict=True)]
    if others is not None:
        spans = [TwoPools(span, PageSpan(row, span.tokens)) for span, row in zip(spans, rows[1], strict=True)]
    hidden_TD = decoder.forward(ids, spans, most_queries=4)
    kv = [
        torch.cat([kv_T2GH for row in pool for _, kv_T2GH in row.spans(layer, row_tokens(row))])
        for pool in rows
        for layer in range(len(pool[0].table.data_LPS2GH))
    ]
    return hidden_TD, torch.stack(kv)


def row_tokens(row: RowPages) -> TokenRange:
    """Return the positions of the tokens of a sequence of `check_forward`, whose table has no spare pages."""
    return TokenRange(0, min(length for length in LENGTHS if -(-length // 16) == len(row.table.pages_C)))
