"""The native attention of a generation step over rows in pages: that of rows in one piece, bit for bit."""

import pytest
import torch

from baton.modeling.forward.decode_rows import DecodeRows, has_native_rows
from baton.modeling.kernels import native
from baton.modeling.kernels.calls.checks import RowKeys
from baton.modeling.kernels.products import WIDENED
from baton.modeling.kv.buffers import BufferSpan, KvBuffer, KvPlace
from baton.modeling.kv.pages import PageSpan, RowPages
from baton.types import KvLayout, TokenRange
from tests.support.kernels.paged_rows import in_pages

LENGTHS = (1, 15, 64, 65, 130, 700, 1500)
NUM_LAYERS = 2
PAGES = (16, 64, 512)
HEADS = [pytest.param((4, 4), id="mha"), pytest.param((9, 3), id="gqa"), pytest.param((14, 2), id="gqa7"), (4, 1)]

pytestmark = pytest.mark.skipif(
    not has_native_rows(torch.device("cpu"), torch.bfloat16, 64), reason="needs a C++ compiler"
)


def check(
    heads: tuple[int, int],
    head_dim: int,
    num_new: int,
    page_tokens: int,
    *,
    dtype: str = "bfloat16",
    window: int | None = None,
    unseen: TokenRange | None = None,
) -> None:
    """Rows of all LENGTHS, each with `num_new` queries, in every layer."""
    num_heads, num_kv_heads = heads
    layout = KvLayout("test", NUM_LAYERS, num_kv_heads, head_dim, dtype)
    generator = torch.Generator().manual_seed(head_dim + num_new)
    buffers = [KvBuffer(layout, TokenRange(0, length + num_new - 1)) for length in LENGTHS]
    for each in buffers:
        each.data.copy_(torch.randn(each.data.shape, generator=generator))
    rows = in_pages(buffers, page_tokens)

    def place(whole: KvBuffer, pages: RowPages | None) -> KvPlace:
        tokens = TokenRange(len(whole.tokens) - num_new, len(whole.tokens))
        hidden = unseen if unseen is not None and unseen.end <= tokens.start else None
        found = (BufferSpan(whole, tokens) if pages is None else PageSpan(pages, tokens)).place()
        return KvPlace(**(vars(found) | {"unseen": hidden}))

    def step(places: list[KvPlace]) -> DecodeRows:
        spans = [(index * num_new, each) for index, each in enumerate(places)]
        return DecodeRows(spans, layout.row_bytes, (None, window))

    plain = step([place(each, None) for each in buffers])
    paged = step([place(each, row) for each, row in zip(buffers, rows, strict=True)])
    shape = len(LENGTHS) * num_new, num_heads + 2 * num_kv_heads, head_dim
    fused = (2 * torch.randn(shape, generator=generator)).to(getattr(torch, dtype))
    q_TNH, k_TGH, v_TGH = torch.split(fused, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    for layer in range(NUM_LAYERS):
        plain.append(layer, k_TGH, v_TGH)
        paged.append(layer, k_TGH, v_TGH)
        expected_BNH = plain.attend(layer, q_TNH, num_kv_heads)
        assert not expected_BNH.isnan().any()
        assert torch.equal(paged.attend(layer, q_TNH, num_kv_heads), expected_BNH)
        for whole, row in zip(buffers, rows, strict=True):
            for part, kv_T2GH in row.spans(layer, whole.tokens):
                assert torch.equal(kv_T2GH, whole.span(layer, part))


@pytest.mark.parametrize("page_tokens", PAGES)
@pytest.mark.parametrize("num_new", [1, 2, 8])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_pages_in_any_order_change_no_bit(dtype: str, heads: tuple[int, int], num_new: int, page_tokens: int) -> None:
    check(heads, 64, num_new, page_tokens, dtype=dtype)


@pytest.mark.parametrize("num_new", range(1, 9))
def test_up_to_eight_queries_a_row(num_new: int) -> None:
    check((6, 2), 32, num_new, 64)


@pytest.mark.parametrize("head_dim", [16, 80, 96, 128, 256])
def test_head_dims(head_dim: int) -> None:
    check((6, 2), head_dim, 3, 32)


@pytest.mark.parametrize("window", [1, 40, 300])
def test_windows(window: int) -> None:
    check((9, 3), 64, 1, 64, window=window)


@pytest.mark.parametrize("num_new", [1, 4])
def test_keys_that_rows_leave_out(num_new: int) -> None:
    check((9, 3), 64, num_new, 64, unseen=TokenRange(4, 500))


def test_tables_that_do_not_fit_are_refused() -> None:
    x_BGH, one = torch.zeros(1, 1, 64, dtype=torch.bfloat16), torch.ones(1, dtype=torch.int64)
    pages_BC = torch.zeros(1, 2, dtype=torch.int64)
    for lengths, table, page_tokens, why in (
        (33 * one, pages_BC, 16, "more keys than its block table"),
        (one, pages_BC, 24, "no power of two"),
        (one, pages_BC.int(), 16, "int64"),
    ):
        with pytest.raises(RuntimeError, match=why):
            native.operators().append_kv(x_BGH, x_BGH, one, lengths, (table, page_tokens))
        with pytest.raises(RuntimeError, match=why):
            native.operators().decode_attention(x_BGH, RowKeys(one, lengths, (table, page_tokens)), 1, WIDENED)
