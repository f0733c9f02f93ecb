"""How Attention cuts work into blocks for a kernel, and how it merges them. The numbers of the kernels themselves are
checked in tests/conformance/test_attention_kernels.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.modeling.forward.attention import (
    Attention,
    Partial,
    cpu_flash_kernel,
    default_kernel,
    native_kernel,
    plain_kernel,
)
from baton.modeling.kernels import native
from baton.modeling.kv.buffers import KvRows
from tests.support.kernels.brute_attention import brute_attention
from tests.support.kernels.segments import attend

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8


@dataclass(frozen=True)
class Call:
    """One block that a kernel was given."""

    positions: tuple[tuple[int, int], ...]
    """First and end position of each piece of keys."""
    causal: bool
    masked: bool


class Recorder:
    """The plain kernel, remembering what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, q_TNH: Tensor, pieces: Sequence[KvRows], causal: bool, mask_TS: Tensor | None) -> Partial:
        positions = tuple((each.first_position, each.end_position) for each in pieces)
        self.calls.append(Call(positions, causal, mask_TS is not None))
        return plain_kernel(q_TNH, pieces, causal, mask_TS)


def queries(num_queries: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_queries, NUM_HEADS, HEAD_DIM, generator=generator).to(dtype)


def cached(num_keys: int, first_position: int = 0, dtype: torch.dtype = torch.float32) -> KvRows:
    generator = torch.Generator().manual_seed(2)
    k_SGH, v_SGH = torch.randn(2, num_keys, NUM_KV_HEADS, HEAD_DIM, generator=generator).to(dtype)
    return KvRows(k_SGH, v_SGH, first_position)


def calls_for(first_query: int, num_queries: int, window: int | None, *segments: KvRows) -> list[Call]:
    recorder = Recorder()
    attend(queries(num_queries), first_query, segments, window, recorder)
    return recorder.calls


def test_whole_prefill_is_one_causal_square() -> None:
    assert calls_for(0, 10, None, cached(10)) == [Call(((0, 10),), causal=True, masked=False)]


def test_chunk_is_a_dense_rectangle_and_a_causal_square() -> None:
    assert calls_for(6, 4, None, cached(10)) == [Call(((0, 6), (6, 10)), causal=True, masked=False)]


def test_segments_that_all_see_are_one_call() -> None:
    rows = cached(10)
    segments = [rows.slice(0, 2), rows.slice(6, 10), rows.slice(2, 5), rows.slice(5, 6)]
    assert calls_for(6, 4, None, *segments) == [
        Call(((0, 2), (6, 10)), causal=True, masked=False),
        Call(((2, 5), (5, 6)), causal=False, masked=False),
    ]


def test_one_query_is_one_dense_block() -> None:
    assert calls_for(9, 1, None, cached(10)) == [Call(((0, 10),), causal=False, masked=False)]


def test_one_query_in_a_window_reads_the_window_only() -> None:
    assert calls_for(9, 1, 4, cached(10)) == [Call(((6, 10),), causal=False, masked=False)]


def test_window_wider_than_the_sequence_changes_nothing() -> None:
    assert calls_for(6, 4, 10, cached(10)) == calls_for(6, 4, None, cached(10))


def test_keys_behind_every_window_are_not_read() -> None:
    calls = calls_for(50, 3, 5, cached(100))
    assert min(start for call in calls for start, _ in call.positions) == 46
    assert max(end for call in calls for _, end in call.positions) == 53


def test_segment_of_no_visible_key_is_skipped() -> None:
    later, long_ago = cached(5, first_position=60), cached(5, first_position=0)
    assert [call.positions for call in calls_for(50, 1, 5, later, long_ago, cached(5, 46))] == [((46, 51),)]


def test_rectangle_cut_across_the_diagonal_is_never_called_causal() -> None:
    rows = cached(12)
    calls = calls_for(4, 8, None, rows.slice(0, 7), rows.slice(7, 12))
    assert all(not call.causal for call in calls)
    assert [call.masked for call in calls] == [True, True, False]


@settings(deadline=None)
@given(
    num_queries=st.integers(1, 12),
    first_query=st.integers(0, 20),
    window=st.none() | st.integers(1, 40),
    cuts=st.sets(st.integers(1, 31), max_size=6),
    random=st.randoms(use_true_random=False),
)
def test_any_cut_in_any_order_gives_the_same(
    num_queries: int, first_query: int, window: int | None, cuts: set[int], random: Random
) -> None:
    rows = cached(first_query + num_queries)
    edges = [0, *sorted(cut for cut in cuts if cut < rows.end_position), rows.end_position]
    segments = [rows.slice(start, end) for start, end in pairwise(edges)]
    random.shuffle(segments)
    q_TNH = queries(num_queries)
    o_TNH = attend(q_TNH, first_query, segments, window, default_kernel(torch.device("cpu"), q_TNH.dtype))
    expected_o_TNH, _ = brute_attention(q_TNH, rows, first_query, window)
    torch.testing.assert_close(o_TNH.double(), expected_o_TNH, atol=2e-6, rtol=2e-6)


def test_result_has_the_queries_dtype() -> None:
    rows = cached(10, dtype=torch.bfloat16)
    o_TNH = attend(queries(4, torch.bfloat16), 6, [rows.slice(0, 3), rows.slice(3, 10)], None, plain_kernel)
    assert o_TNH.dtype == torch.bfloat16


def test_many_bf16_segments_are_merged_in_fp32() -> None:
    """200 segments merged in bf16 would lose what each adds: the merge must not round in between."""
    rows, q_TNH = cached(200, dtype=torch.bfloat16), queries(1, torch.bfloat16)
    o_TNH = attend(q_TNH, 199, [rows.slice(at, at + 1) for at in range(200)], None, plain_kernel)
    expected_o_TNH, _ = brute_attention(q_TNH, rows, 199)
    torch.testing.assert_close(o_TNH.double(), expected_o_TNH, atol=2e-3, rtol=1e-2)


def test_result_can_be_read_before_the_next_segment_is_added() -> None:
    rows, q_TNH = cached(10), queries(1)
    attention = Attention(q_TNH, 9, None, plain_kernel)
    attention.add(rows.slice(5, 10))
    first = attention.result()
    kept = first.clone()
    attention.add(rows.slice(0, 5))
    assert torch.equal(first, kept)
    torch.testing.assert_close(attention.result().double(), brute_attention(q_TNH, rows, 9)[0], atol=2e-6, rtol=2e-6)


def test_result_without_a_visible_key_is_a_bug() -> None:
    attention = Attention(queries(2), 0, None, plain_kernel)
    attention.add(cached(3, first_position=5))
    with pytest.raises(AssertionError, match="no visible key"):
        attention.result()


def test_cpu_has_its_own_kernel() -> None:
    assert default_kernel(torch.device("cpu"), torch.float64) is cpu_flash_kernel
    fastest = native_kernel if native.load() else cpu_flash_kernel
    assert default_kernel(torch.device("cpu"), torch.bfloat16) is fastest
    assert default_kernel(torch.device("cpu"), torch.float32) is fastest
    assert default_kernel(torch.device("cuda"), torch.bfloat16) is plain_kernel
