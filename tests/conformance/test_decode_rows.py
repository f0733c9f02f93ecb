"""The native attention of a generation step, against the definition of attention in float64: to all keys, and to those
that are picked."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton.modeling.forward.decode_rows import DecodeRows, has_native_rows
from baton.modeling.forward.selection import Picks
from baton.modeling.kernels import native
from baton.modeling.kernels.calls.checks import RowKeys
from baton.modeling.kernels.products import WIDENED
from baton.modeling.kv.buffers import BufferSpan, KvBuffer, KvRows
from baton.types import KvLayout, TokenRange
from tests.support.kernels.brute_attention import brute_attention

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 700, 1500)
NUM_LAYERS = 2
HEADS = [pytest.param((4, 4), id="mha"), pytest.param((9, 3), id="gqa"), pytest.param((14, 2), id="gqa7"), (4, 1)]
TOLERANCES = {"bfloat16": 2e-2, "float32": 2e-6}

pytestmark = pytest.mark.skipif(
    not has_native_rows(torch.device("cpu"), torch.bfloat16, HEAD_DIMS[0]),
    reason="needs a C++ compiler",
)


def filled(num_kv_heads: int, head_dim: int, num_tokens: int, seed: int, dtype: str = "bfloat16") -> KvBuffer:
    """Random KV, but for the last token, whose rows are NaN: they are not written yet."""
    layout = KvLayout("test", NUM_LAYERS, num_kv_heads, head_dim, dtype)
    buffer = KvBuffer(layout, TokenRange(0, num_tokens))
    generator = torch.Generator().manual_seed(seed)
    buffer.data.copy_(torch.randn(buffer.data.shape, generator=generator))
    buffer.data[:, -1] = float("nan")
    return buffer


def rows_of(buffers: list[KvBuffer], windows: tuple[int | None, ...] = (None,) * NUM_LAYERS) -> DecodeRows:
    """A row for each buffer's last token; the step's tokens are in reverse."""
    num = len(buffers)
    spans = [BufferSpan(each, TokenRange(each.tokens.end - 1, each.tokens.end)) for each in buffers]
    places = [(num - 1 - index, span.place()) for index, span in enumerate(spans)]
    return DecodeRows(places, buffers[0].layout.row_bytes, windows)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def lists_for(num_kv_heads: int) -> tuple[Picks, list[list[Tensor]]]:
    """Half of the keys of rows of LENGTHS, the last among them; a list for each kv head, padded with what is no key."""
    generator = torch.Generator().manual_seed(97)
    keys_BGK = torch.full((len(LENGTHS), num_kv_heads, max(LENGTHS)), -1, dtype=torch.int32)
    chosen = []
    for row, length in enumerate(LENGTHS):
        others = [torch.randperm(length - 1, generator=generator)[: length // 2] for _ in range(num_kv_heads)]
        chosen.append([torch.cat((each, torch.tensor([length - 1]))).sort().values for each in others])
        for g, keys in enumerate(chosen[-1]):
            keys_BGK[row, g, : len(keys)] = keys
    num_BG = torch.tensor([[len(keys) for keys in each] for each in chosen], dtype=torch.int32)
    return Picks(keys_BGK, num_BG), chosen


def check_rows(head_dim: int, heads: tuple[int, int], window: int | None, dtype: str = "bfloat16") -> None:
    """Rows of all LENGTHS, in the last layer."""
    num_heads, num_kv_heads = heads
    buffers = [filled(num_kv_heads, head_dim, length, seed, dtype) for seed, length in enumerate(LENGTHS)]
    rows = rows_of(buffers, (None, window))
    fused = random(
        len(buffers), num_heads + 2 * num_kv_heads, head_dim, seed=99, dtype=getattr(torch, dtype)
    )  # as projections come
    q_TNH, k_TGH, v_TGH = torch.split(fused, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    layer = NUM_LAYERS - 1
    rows.append(layer, k_TGH, v_TGH)
    out_BNH = rows.attend(layer, q_TNH, num_kv_heads)
    for index, buffer in enumerate(buffers):
        token = len(buffers) - 1 - index
        last = buffer.tokens.end - 1
        assert torch.equal(buffer.data[layer, last, 0], k_TGH[token])
        assert torch.equal(buffer.data[layer, last, 1], v_TGH[token])
        assert buffer.data[0, last].isnan().all()  # the other layer's are untouched
        expected_1NH, _ = brute_attention(
            q_TNH[token : token + 1], buffer.rows(layer, buffer.tokens), last, window=window
        )
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(out_BNH[index].double(), expected_1NH[0], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_each_row_attends_to_its_own_keys(dtype: str, head_dim: int, heads: tuple[int, int]) -> None:
    check_rows(head_dim, heads, None, dtype)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [1, 40])
def test_a_window_hides_keys(window: int, heads: tuple[int, int]) -> None:
    check_rows(64, heads, window)


@pytest.mark.parametrize("window", [None, 40])
def test_rows_attend_to_what_is_picked_and_read_nothing_else(window: int | None) -> None:
    """Keys are numbered from the row's first, also where a window would hide it."""
    buffers = [filled(3, 64, length, seed) for seed, length in enumerate(LENGTHS)]
    rows = rows_of(buffers, (None, window))
    fused = random(len(buffers), 15, 64, seed=98)
    q_TNH, k_TGH, v_TGH = torch.split(fused, [9, 3, 3], dim=1)
    rows.append(1, k_TGH, v_TGH)
    picks, chosen = lists_for(3)
    expected = []
    for index, (buffer, keys_GK) in enumerate(zip(buffers, chosen, strict=True)):
        kept_2GKH = torch.stack([buffer.data[1, keys, :, g] for g, keys in enumerate(keys_GK)]).permute(2, 0, 1, 3)
        buffer.data[1] = float("nan")
        for g, keys in enumerate(keys_GK):
            buffer.data[1, keys, :, g] = kept_2GKH[:, g].transpose(0, 1)
        q_1NH = q_TNH[len(buffers) - 1 - index].unsqueeze(0)
        for g, (k_KH, v_KH) in enumerate(zip(*kept_2GKH.unbind(), strict=True)):
            picked = KvRows(k_KH.unsqueeze(1), v_KH.unsqueeze(1), 0)
            expected.append(brute_attention(q_1NH[:, 3 * g : 3 * g + 3], picked, 0, dense=True)[0])
    out_BNH = rows.attend(1, q_TNH, 3, picks)
    torch.testing.assert_close(out_BNH.double(), torch.cat(expected).view(out_BNH.shape), atol=2e-2, rtol=2e-2)


def check_spans(heads: tuple[int, int], head_dim: int, num_new: int, unseen: TokenRange | None, dtype: str) -> None:
    """Spans of `num_new` tokens, of several lengths, in the last layer; keys left out are NaN."""
    num_heads, num_kv_heads = heads
    lengths = [num_new, 17, 64, 600]
    buffers = [filled(num_kv_heads, head_dim, length, seed, dtype) for seed, length in enumerate(lengths)]
    spans = [BufferSpan(each, TokenRange(each.tokens.end - num_new, each.tokens.end)) for each in buffers]
    hidden = [unseen if unseen is not None and unseen.end <= span.tokens.start else None for span in spans]
    places = [replace(span.place(), unseen=keys) for span, keys in zip(spans, hidden, strict=True)]
    rows = DecodeRows(
        [(index * num_new, place) for index, place in enumerate(places)],
        buffers[0].layout.row_bytes,
        (None,) * NUM_LAYERS,
    )
    width, layer = num_heads + 2 * num_kv_heads, NUM_LAYERS - 1
    fused = random(len(spans) * num_new, width, head_dim, seed=99, dtype=getattr(torch, dtype))
    q_TNH, k_TGH, v_TGH = torch.split(fused, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    for span, keys in zip(spans, hidden, strict=True):
        if keys is not None:
            span.buffer.data[layer, keys.start : keys.end] = float("nan")
    rows.append(layer, k_TGH, v_TGH)
    out_BNH = rows.attend(layer, q_TNH, num_kv_heads)
    for index, (span, keys) in enumerate(zip(spans, hidden, strict=True)):
        new = slice(index * num_new, (index + 1) * num_new)
        assert torch.equal(span.own(layer)[:, 0], k_TGH[new])
        assert torch.equal(span.own(layer)[:, 1], v_TGH[new])
        for query in range(num_new):
            kv_S2GH = span.buffer.data[layer, : span.tokens.start + query + 1]
            if keys is not None:
                kv_S2GH = torch.cat((kv_S2GH[: keys.start], kv_S2GH[keys.end :]))
            seen = KvRows(kv_S2GH[:, 0], kv_S2GH[:, 1], 0)
            token = index * num_new + query
            expected_1NH, _ = brute_attention(q_TNH[token : token + 1], seen, 0, dense=True)
            tolerance = 2.5 * TOLERANCES[dtype] if dtype == "float32" else TOLERANCES[dtype]  # the worst of many more
            torch.testing.assert_close(out_BNH[token].double(), expected_1NH[0], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("unseen", [None, TokenRange(0, 14), TokenRange(4, 500), TokenRange(16, 16)], ids=str)
@pytest.mark.parametrize("num_new", [pytest.param(num, marks=pytest.mark.ci) for num in (1, 2, 4, 9)] + [6])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_tokens_of_one_sequence_see_the_keys_up_to_their_own_but_for_those_left_out(
    dtype: str, heads: tuple[int, int], num_new: int, unseen: TokenRange | None
) -> None:
    check_spans(heads, 64, num_new, unseen, dtype)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tokens_of_one_sequence_with_every_head_dim(head_dim: int) -> None:
    check_spans((6, 2), head_dim, 5, TokenRange(4, 40), "bfloat16")


def test_rows_that_are_all_of_a_step_in_order_need_no_choosing() -> None:
    buffers = [filled(1, 64, 40, seed) for seed in range(3)]
    q_TNH, k_TGH, v_TGH = random(3, 2, 64, seed=7), random(3, 1, 64, seed=8), random(3, 1, 64, seed=9)
    chosen = rows_of(buffers)
    chosen.append(0, k_TGH, v_TGH)
    places = [BufferSpan(each, TokenRange(39, 40)).place() for each in buffers]
    whole = DecodeRows(list(enumerate(places)), buffers[0].layout.row_bytes, (None,) * NUM_LAYERS)
    assert torch.equal(whole.attend(0, q_TNH.flip(0), 1), chosen.attend(0, q_TNH, 1))


def test_threads_share_rows() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check_rows(64, (9, 3), None)
    finally:
        torch.set_num_threads(before)


def test_large_scores_do_not_overflow() -> None:
    buffer = filled(1, 64, 300, seed=1)
    buffer.data.mul_(100).nan_to_num_(1.0)
    q_TNH = random(1, 2, 64, seed=2) * 100
    out_BNH = rows_of([buffer]).attend(0, q_TNH, 1)
    expected_1NH, _ = brute_attention(q_TNH, buffer.rows(0, buffer.tokens), 299)
    torch.testing.assert_close(out_BNH.double(), expected_1NH, atol=1.0, rtol=2e-2)


def test_a_row_without_a_key_is_refused() -> None:
    rows_BGH, addresses_B = random(1, 1, 64, seed=1), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="every row has a key"):
        native.operators().append_kv(rows_BGH, rows_BGH, addresses_B, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="every row has a key"):
        native.operators().decode_attention(
            rows_BGH, RowKeys(addresses_B, torch.zeros(1, dtype=torch.int64)), 1, WIDENED
        )


def test_a_token_beyond_its_buffer_has_no_place() -> None:
    with pytest.raises(AssertionError, match="outside"):
        BufferSpan(filled(1, 64, 4, seed=1), TokenRange(4, 5)).place()
