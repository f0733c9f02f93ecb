"""Checks of Triton's prefill attention over paged KV against the definition of attention in float64, query by query.

Everything that no query of a sequence attends to is NaN, as in the checks of decode attention
(`tests.support.kernels.triton.decode`). The step has tokens that belong to no sequence: the first and the last.

B sequences, T tokens, N heads, H head dim, P pages, C pages per sequence.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from baton.modeling.kernels.triton.row_kernels import StepRows
from baton.modeling.kernels.triton.spans import SpanRows, divide, span_attention, tiles_for
from baton.modeling.kernels.triton.tiles import PrefillTiles
from tests.support.kernels.covering import Levels
from tests.support.kernels.triton import decode
from tests.support.kernels.triton.decode import TOLERANCES, DecodeCase, Step, by_definition

LEVELS: Levels = {
    **{name: decode.LEVELS[name] for name in ("dtype", "group", "num_kv_heads", "head_dim", "page_tokens")},
    "lengths": ("first chunks", "later chunks"),
    "window": (None, 1, 9, 1000),
    "tile_keys": (None, 16, 32),
    "is_view": (False, True),
}
"""Levels of the fields of DecodeCase that matter here."""
SPOILERS = ("table", "lengths", "firsts", "window")
"""Names of the arguments that can be falsified."""


def check_spans(case: DecodeCase, device: str, spoilt: str = "") -> None:
    """Assert that the kernel's results equal the definition's. `spoilt`: name of an argument in SPOILERS that is
    falsified for the kernel; then the assertion must fail."""
    step = decode.made(case)
    o_TNH = attended(step, device, spoilt)
    assert o_TNH.dtype == case.dtype
    num_tokens, tolerance = sum(step.num_new), TOLERANCES[case.dtype]
    expected_TNH = by_definition(step)[:num_tokens]
    torch.testing.assert_close(o_TNH[1 : 1 + num_tokens].cpu().double(), expected_TNH, atol=tolerance, rtol=tolerance)
    assert o_TNH[0].isnan().all() and o_TNH[1 + num_tokens :].isnan().all(), "tokens of no sequence were written"


def check_alone(case: DecodeCase, device: str) -> None:
    """Assert that each sequence gets bitwise the same result alone, in other pages, and in the batch."""
    step = decode.made(case)
    together_TNH, start = attended(step, device), 0
    moved_P = torch.arange(len(step.pages_PS2GH)).flip(0)
    pages_PS2GH = step.pages_PS2GH[moved_P]
    for row, num_new in enumerate(step.num_new):
        own = slice(start, start + num_new)
        table_1C = (len(moved_P) - 1 - step.table_BC[row : row + 1]).int()
        one = [step.lengths[row]], [num_new], [step.unseen[row]]
        q_TNH = step.q_TNH[[*range(own.start, own.stop), -2, -1]]
        alone = Step(case, q_TNH, pages_PS2GH, table_1C, *one)
        o_TNH = attended(alone, device)[1 : 1 + num_new]
        assert torch.equal(o_TNH, together_TNH[1:][own]), f"row {row}"
        start = own.stop


def attended(step: Step, device: str, spoilt: str = "") -> Tensor:
    """Return the kernel's results, by the index of a token in the step. The sequences' tokens begin at index 1. Results
    that the kernel does not write are NaN."""
    case, lengths, window = step.case, torch.tensor(step.lengths, dtype=torch.int32), step.case.window
    table_BC = step.table_BC.clone()
    starts_E = torch.tensor([sum(step.num_new[:row]) for row in range(len(lengths) + 1)], dtype=torch.int32)
    firsts_B = starts_E[:-1] + 1
    if spoilt == "table":
        num_pages = -(-step.lengths[-1] // case.page_tokens)
        table_BC[-1, :num_pages] = table_BC[-1, :num_pages].roll(1)
    if spoilt == "lengths":
        lengths[-1] -= 1
    if spoilt == "firsts":
        firsts_B[1:] -= 1
    if spoilt == "window":
        window = 8 if window is None else window + 1
    rows = StepRows(
        table_BC=table_BC.to(device),
        lengths_B=lengths.to(device),
        starts_E=starts_E.to(device),
        most_queries=max(step.num_new),
        most_keys=max(step.lengths),
        firsts_B=firsts_B.to(device),
    )
    pages_PS2GH, q_TNH = step.pages_PS2GH.to(device), step.q_TNH.to(device).roll(1, 0)
    tiles = tiles_for(pages_PS2GH.shape[4], pages_PS2GH.dtype, pages_PS2GH.device)
    if case.tile_keys is not None:
        tiles = PrefillTiles(case.tile_keys, case.tile_keys, num_warps=4)
    blocks_X2 = torch.from_numpy(divide(step.num_new, step.lengths, case.group, tiles.rows)).to(device)
    o_TNH = torch.full(q_TNH.shape, torch.nan, dtype=q_TNH.dtype, device=device)
    found_TNH = span_attention(q_TNH, pages_PS2GH, SpanRows(rows, blocks_X2, tiles), window=window, o_TNH=o_TNH)
    assert found_TNH is o_TNH
    return o_TNH


def cases(levels: list[dict[str, Any]]) -> list[DecodeCase]:
    """Return the cases of a covering of LEVELS."""
    return [replace(DecodeCase(), **each) for each in levels]
