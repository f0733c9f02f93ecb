"""Attention kernels in Triton, compiled for the GPU, against attention by its definition in float64: every case that
tests/conformance/test_triton_kernels.py gives Triton's interpreter, and what only a GPU can do."""

import pytest
import torch

from baton.modeling.device.cuda import CudaDevice
from tests.support.kernels.covering import covering
from tests.support.kernels.triton import copies, decode, prefill, refusals, sampler, spans, steps
from tests.support.kernels.triton.decode import DecodeCase
from tests.support.kernels.triton.prefill import PrefillCase

pytestmark = pytest.mark.gpu
DECODE_CASES = [DecodeCase(**each) for each in covering(decode.LEVELS)]  # type: ignore[arg-type]
PREFILL_CASES = [PrefillCase(**each) for each in covering(prefill.LEVELS)]  # type: ignore[arg-type]


@pytest.mark.parametrize("case", DECODE_CASES, ids=str)
def test_decode_attention(case: DecodeCase) -> None:
    decode.check_decode(case, "cuda")


@pytest.mark.parametrize("case", PREFILL_CASES, ids=str)
def test_prefill_attention(case: PrefillCase) -> None:
    prefill.check_prefill(case, "cuda")


@pytest.mark.parametrize("case", spans.cases(covering(spans.LEVELS)), ids=str)
def test_prefill_attention_over_pages(case: DecodeCase) -> None:
    spans.check_spans(case, "cuda")


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_span_depends_neither_on_others_nor_on_its_pages(
    dtype: torch.dtype, head_dim: int, window: int | None
) -> None:
    case = DecodeCase(dtype, head_dim=head_dim, page_tokens=16, lengths="later chunks", window=window, tile_keys=None)
    spans.check_alone(case, "cuda")


@pytest.mark.parametrize("case", [each for each in DECODE_CASES if each.num_picks == 0], ids=str)
def test_new_keys_lie_where_the_table_says(case: DecodeCase) -> None:
    decode.check_append(case, "cuda")


@pytest.mark.parametrize("num_picks", [0, 300])
def test_long_rows_are_split_and_merged(num_picks: int) -> None:
    case = DecodeCase(torch.bfloat16, 2, lengths="long", page_tokens=16, num_picks=num_picks, tile_keys=None)
    decode.check_decode(case, "cuda")


@pytest.mark.parametrize("num_picks", [0, 20])
def test_a_row_does_not_depend_on_the_others(num_picks: int) -> None:
    decode.check_rows_alone(DecodeCase(torch.float16, num_picks=num_picks, tile_keys=16), "cuda")


@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_what_is_no_number_spoils_exactly_what_reads_it(part: int) -> None:
    decode.check_bad_number(part, "cuda")


def test_segments_that_are_merged_are_one_sequence() -> None:
    prefill.check_merging("cuda")


@pytest.mark.parametrize("window", [None, 5])
def test_segments_may_come_in_any_order(window: int | None) -> None:
    prefill.check_attend(window, "cuda")


@pytest.mark.parametrize(("dtype", "head_dim"), copies.HEADS)
def test_picked_heads_are_copied_by_address(dtype: torch.dtype, head_dim: int) -> None:
    copies.check_heads(dtype, head_dim, "cuda")


@pytest.mark.parametrize(("num_numbers", "dtype"), copies.ROWS)
def test_rows_are_copied_by_address(num_numbers: int, dtype: torch.dtype) -> None:
    copies.check_rows(num_numbers, dtype, "cuda")


@pytest.mark.parametrize("spoilt", decode.SPOILERS)
def test_what_decode_attention_is_told_wrongly_shows(spoilt: str) -> None:
    case = DecodeCase(lengths="edges", has_unseen=spoilt == "unseen", num_picks=4 if "picks" in spoilt else 0)
    with pytest.raises(AssertionError, match="not close"):
        decode.check_decode(case, "cuda", spoilt)


@pytest.mark.parametrize("text", refusals.CALLS)
def test_tensors_that_do_not_fit_are_refused(text: str) -> None:
    assert text in refusals.refusal(text)


@pytest.mark.parametrize("captures", [False, True], ids=["launched", "captured"])
@pytest.mark.parametrize("window", [None, 9])
def test_steps_over_pages_choose_the_tokens_of_the_cpu(captures: bool, window: int | None) -> None:
    steps.check_steps(CudaDevice(), captures=captures, window=window)


@pytest.mark.parametrize("captures", [False, True], ids=["launched", "captured"])
def test_steps_of_all_shapes_have_the_logits_of_the_cpu(captures: bool) -> None:
    steps.check_shapes(CudaDevice(), captures=captures)


@pytest.mark.parametrize("captures", [False, True], ids=["launched", "captured"])
def test_pages_whose_keys_are_left_out_are_not_read(captures: bool) -> None:
    steps.check_left_out_pages(CudaDevice(), captures=captures)


@pytest.mark.parametrize(
    ("vocab_size", "num_rows"), [(64, 40_000), (700, 40_000), (4096, 20_000), (50_257, 200), (128_256, 200)]
)
def test_drawn_tokens_are_those_of_each_row(vocab_size: int, num_rows: int) -> None:
    for seed in range(num_rows // 200):
        sampler.check_random(seed, 200, vocab_size, "cuda")


def test_a_batch_has_rows_of_all_parameters() -> None:
    sampler.check_mixed(5000, "cuda")
    sampler.check_equal("cuda")
    sampler.check_other_rows("cuda")
    sampler.check_without_distribution("cuda")
    sampler.check_near_ties("cuda")
    sampler.check_limits_of_filters("cuda")
