"""Attention kernels in Triton, against the definition of attention in float64: compiled where there is a GPU, else in
Triton's interpreter, which has a process of its own (tests/support/kernels/triton/process.py).

Every two levels of any two factors meet in some case. The first cases cover most pairs; the others are marked `ci`.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from baton.errors import ConfigError
from baton.modeling.kernels.triton.launch import require_triton
from tests.support.kernels.covering import Levels, covering, pairs
from tests.support.kernels.triton import copies, decode, pointwise, prefill, refusals, spans
from tests.support.kernels.triton.decode import DecodeCase
from tests.support.kernels.triton.prefill import PrefillCase
from tests.support.kernels.triton.process import DEVICE, HAS_TRITON, Run

pytestmark = pytest.mark.integration

NEEDS_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
DECODE_CASES = [DecodeCase(**each) for each in covering(decode.LEVELS)]  # type: ignore[arg-type]
PREFILL_CASES = [PrefillCase(**each) for each in covering(prefill.LEVELS)]  # type: ignore[arg-type]
SPAN_CASES = spans.cases(covering(spans.LEVELS))
APPEND_CASES = [each for each in DECODE_CASES if each.num_picks == 0]
NUM_QUICK = 8
"""Cases of each kernel that `make test` runs."""


def lanes(cases: Sequence[object]) -> list[object]:
    """The cases as parameters, with their lanes."""
    marks = [()] * NUM_QUICK + [pytest.mark.ci] * len(cases)
    return [pytest.param(case, id=str(case), marks=mark) for case, mark in zip(cases, marks, strict=False)]


@pytest.fixture
def run(interpreter: Run) -> Run:
    """A way to call functions that launch kernels on DEVICE."""
    return interpreter if DEVICE == "cpu" else lambda function, *arguments: function(*arguments)


@NEEDS_TRITON
@pytest.mark.parametrize("case", lanes(DECODE_CASES))
def test_decode_attention(run: Run, case: DecodeCase) -> None:
    run(decode.check_decode, case, DEVICE)


@NEEDS_TRITON
@pytest.mark.parametrize("case", lanes(PREFILL_CASES))
def test_prefill_attention(run: Run, case: PrefillCase) -> None:
    run(prefill.check_prefill, case, DEVICE)


@NEEDS_TRITON
@pytest.mark.parametrize("case", lanes(SPAN_CASES))
def test_prefill_attention_over_pages(run: Run, case: DecodeCase) -> None:
    run(spans.check_spans, case, DEVICE)


@NEEDS_TRITON
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_span_depends_neither_on_others_nor_on_its_pages(run: Run, dtype: torch.dtype, window: int | None) -> None:
    """Bit for bit: the attention of new tokens is the same alone, in other pages, and in any batch."""
    run(spans.check_alone, DecodeCase(dtype, lengths="later chunks", window=window, tile_keys=None), DEVICE)


@NEEDS_TRITON
@pytest.mark.parametrize("spoilt", spans.SPOILERS)
def test_what_prefill_attention_over_pages_is_told_wrongly_shows(run: Run, spoilt: str) -> None:
    case = DecodeCase(lengths="later chunks", window=9)
    run(spans.check_spans, case, DEVICE)
    with pytest.raises(AssertionError, match="not close"):
        run(spans.check_spans, case, DEVICE, spoilt)


@NEEDS_TRITON
@pytest.mark.parametrize("case", lanes(APPEND_CASES))
def test_new_keys_lie_where_the_table_says(run: Run, case: DecodeCase) -> None:
    run(decode.check_append, case, DEVICE)


@NEEDS_TRITON
@pytest.mark.parametrize("num_picks", [0, 300])
def test_long_rows_are_split_and_merged(run: Run, num_picks: int) -> None:
    case = DecodeCase(torch.bfloat16, 2, lengths="long", page_tokens=16, num_picks=num_picks, tile_keys=None)
    run(decode.check_decode, case, DEVICE)


@NEEDS_TRITON
@pytest.mark.parametrize("num_picks", [0, 20])
def test_a_row_does_not_depend_on_the_others(run: Run, num_picks: int) -> None:
    """Bit for bit: a token's attention is the same alone and in any batch."""
    run(decode.check_rows_alone, DecodeCase(torch.float16, num_picks=num_picks, tile_keys=16), DEVICE)


@NEEDS_TRITON
def test_a_pair_of_a_query_and_a_head_has_one_of_many_tiles(run: Run) -> None:
    """One kv head for 71 heads, as Falcon has: more pairs than a tile has rows."""
    run(decode.check_decode, DecodeCase(most_queries=2, group=71, num_kv_heads=1, lengths="new"), DEVICE)


@NEEDS_TRITON
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_what_is_no_number_spoils_exactly_what_reads_it(run: Run, part: int) -> None:
    run(decode.check_bad_number, part, DEVICE)


@NEEDS_TRITON
def test_segments_that_are_merged_are_one_sequence(run: Run) -> None:
    run(prefill.check_merging, DEVICE)


@NEEDS_TRITON
@pytest.mark.parametrize("window", [None, 5])
def test_segments_may_come_in_any_order(run: Run, window: int | None) -> None:
    run(prefill.check_attend, window, DEVICE)


@NEEDS_TRITON
@pytest.mark.parametrize(("dtype", "head_dim"), copies.HEADS)
def test_picked_heads_are_copied_by_address(run: Run, dtype: torch.dtype, head_dim: int) -> None:
    run(copies.check_heads, dtype, head_dim, DEVICE)


@NEEDS_TRITON
@pytest.mark.parametrize(("num_numbers", "dtype"), copies.ROWS)
def test_rows_are_copied_by_address(run: Run, num_numbers: int, dtype: torch.dtype) -> None:
    run(copies.check_rows, num_numbers, dtype, DEVICE)


@NEEDS_TRITON
@pytest.mark.parametrize("width", pointwise.WIDTHS)
@pytest.mark.parametrize("dtype", pointwise.TOLERANCES)
def test_norms_and_gates_are_their_definitions(run: Run, dtype: torch.dtype, width: int) -> None:
    run(pointwise.check_norm, dtype, width, DEVICE)
    run(pointwise.check_gate, dtype, width, DEVICE)


@NEEDS_TRITON
@pytest.mark.parametrize(("num_heads", "head_dim"), pointwise.HEADS)
@pytest.mark.parametrize("dtype", pointwise.TOLERANCES)
def test_heads_are_turned_by_their_tokens_angles(run: Run, dtype: torch.dtype, num_heads: int, head_dim: int) -> None:
    run(pointwise.check_turn, dtype, num_heads, head_dim, DEVICE)


@NEEDS_TRITON
@pytest.mark.parametrize("spoilt", decode.SPOILERS)
def test_what_decode_attention_is_told_wrongly_shows(run: Run, spoilt: str) -> None:
    """The checks above can fail: for a wrong table, length, start, window, range or list."""
    case = DecodeCase(lengths="edges", has_unseen=spoilt == "unseen", num_picks=4 if "picks" in spoilt else 0)
    run(decode.check_decode, case, DEVICE)
    with pytest.raises(AssertionError, match="not close"):
        run(decode.check_decode, case, DEVICE, spoilt)


@NEEDS_TRITON
@pytest.mark.parametrize("spoilt", prefill.SPOILERS)
def test_what_prefill_attention_is_told_wrongly_shows(run: Run, spoilt: str) -> None:
    case = replace(PrefillCase(), first_key=2)
    run(prefill.check_prefill, case, DEVICE)
    with pytest.raises(AssertionError, match="not close"):
        run(prefill.check_prefill, case, DEVICE, spoilt)


@NEEDS_TRITON
@pytest.mark.parametrize("text", refusals.CALLS)
def test_tensors_that_do_not_fit_are_refused(run: Run, text: str) -> None:
    assert text in run(refusals.refusal, text)


def test_without_triton_one_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match="pip install 'baton-serve"):
        require_triton()


@NEEDS_TRITON
def test_this_process_does_not_interpret(run: Run) -> None:
    """Other tests of this process may compile kernels, whatever the tests here do."""
    run(decode.check_append, APPEND_CASES[0], DEVICE)
    assert DEVICE == "cuda" or "baton.modeling.kernels.triton.append_kernel" not in sys.modules


@pytest.mark.parametrize("levels", [decode.LEVELS, prefill.LEVELS, spans.LEVELS], ids=["decode", "prefill", "pages"])
def test_every_two_levels_meet(levels: Levels) -> None:
    met = {((a, case[a]), (b, case[b])) for case in covering(levels) for a in levels for b in levels}
    assert set(pairs(levels)) <= met
    assert len(covering(levels)) < 80
