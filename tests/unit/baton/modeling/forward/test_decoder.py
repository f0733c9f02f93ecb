"""Whoever takes part in a forward between layers is asked once a layer what its rows attend to, and obeyed."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from baton.modeling.forward.decode_rows import has_native_rows
from baton.modeling.forward.selection import Picks, StepPicks
from baton.modeling.kv.buffers import BufferSpan
from baton.types import TokenRange
from tests.support.models.tiny_models import random_decoder
from tests.support.paths import filled

HEAD_DIM = 16
CPU = torch.device("cpu")
has_rows = pytest.mark.skipif(not has_native_rows(CPU, torch.bfloat16, HEAD_DIM), reason="needs a C++ compiler")


class Turns:
    """A LayerTurns that notes what it is told, and picks by a function of a layer."""

    def __init__(self, pick: Callable[[int], Picks | None]) -> None:
        self.calls: list[str] = []
        self.queries: list[Tensor] = []
        self._pick = pick

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        self.calls.append(f"begin {layer}")

    def picks(self, layer: int, q_TNH: Tensor) -> Picks | None:
        self.calls.append(f"picks {layer}")
        self.queries.append(q_TNH)
        return self._pick(layer)

    def end(self, layer: int) -> None:
        self.calls.append(f"end {layer}")


def lists(lengths: Sequence[int], num_kv_heads: int, first: int) -> Picks:
    """Pick all keys of each row from number `first` on."""
    keys_BGK = torch.full((len(lengths), num_kv_heads, max(lengths)), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        keys_BGK[row, :, : length - first] = torch.arange(first, length)
    num_B = torch.tensor(lengths, dtype=torch.int32) - first
    return Picks(keys_BGK, num_B.unsqueeze(1).expand(-1, num_kv_heads).contiguous())


@has_rows
@torch.inference_mode()
def test_rows_attend_to_what_is_picked_in_that_layer_and_longer_spans_to_all() -> None:
    decoder = random_decoder(dtype="bfloat16", head_dim=HEAD_DIM, num_layers=2)
    lengths, num_kv_heads = (9, 30), decoder.config.num_kv_heads
    *rows, long = filled(decoder, (*lengths, 6))
    spans = [
        BufferSpan(rows[0], TokenRange(8, 9)),
        BufferSpan(long, TokenRange(2, 6)),
        BufferSpan(rows[1], TokenRange(29, 30)),
    ]
    ids = [5, 6, 7, 8, 9, 10]
    whole_TD = decoder.forward(ids, spans)
    nothing, everything = Turns(lambda _: None), Turns(lambda _: lists(lengths, num_kv_heads, 0))
    assert torch.equal(decoder.forward(ids, spans, nothing), whole_TD)
    assert nothing.calls == ["begin 0", "picks 0", "end 0", "begin 1", "picks 1", "end 1"]
    assert [tuple(each.shape) for each in nothing.queries] == [(6, decoder.config.num_heads, HEAD_DIM)] * 2
    assert torch.equal(decoder.forward(ids, spans, everything), whole_TD)
    for buffer in rows:
        buffer.data[1, :3] = float("nan")
    some = Turns(lambda layer: lists(lengths, num_kv_heads, 3) if layer else None)
    some_TD = decoder.forward(ids, spans, some)
    assert not some_TD.isnan().any()
    assert torch.equal(some_TD[1:5], whole_TD[1:5])
    assert not torch.equal(some_TD[[0, 5]], whole_TD[[0, 5]])


@has_rows
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@torch.inference_mode()
def test_picks_that_are_known_before_are_those_that_turns_bring(dtype: str) -> None:
    decoder = random_decoder(dtype=dtype, head_dim=HEAD_DIM, num_layers=2)
    lengths, num_kv_heads = (9, 30), decoder.config.num_kv_heads
    rows = filled(decoder, lengths)
    spans = [BufferSpan(row, TokenRange(length - 1, length)) for row, length in zip(rows, lengths, strict=True)]
    some = lists(lengths, num_kv_heads, 5)
    by_layer = [Picks((some.keys_BGK - back).clamp(min=0), some.num_BG) for back in (3, 0)]
    whole_TD, expected_TD = (
        decoder.forward([5, 6], spans, Turns(pick)) for pick in (lambda _: None, by_layer.__getitem__)
    )
    known = StepPicks(torch.stack([each.keys_BGK for each in by_layer]), some.num_BG)
    for buffer in rows:
        buffer.data[0, :2] = buffer.data[1, :5] = float("nan")
    assert torch.equal(decoder.forward([5, 6], spans, picks=known), expected_TD)
    assert not torch.equal(expected_TD, whole_TD)


@torch.inference_mode()
def test_longer_spans_take_no_picks() -> None:
    decoder = random_decoder(dtype="bfloat16", head_dim=HEAD_DIM, num_layers=1)
    (buffer,) = filled(decoder, (6,))
    picks = lists((6,), decoder.config.num_kv_heads, 0)
    known = StepPicks(picks.keys_BGK.unsqueeze(0), picks.num_BG)
    with pytest.raises(AssertionError, match="only rows pick keys"):
        decoder.forward([5, 6], [BufferSpan(buffer, TokenRange(4, 6))], picks=known)


@torch.inference_mode()
def test_where_no_row_can_be_served_nobody_is_asked() -> None:
    decoder = random_decoder(dtype="bfloat16", head_dim=HEAD_DIM, num_layers=1)
    (buffer,) = filled(decoder, (6,))
    turns = Turns(lambda _: None)
    decoder.forward([5, 6, 7, 8], [BufferSpan(buffer, TokenRange(2, 6))], turns)
    assert turns.calls == ["begin 0", "end 0"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("results", [[5, 0], [3], []])
@pytest.mark.parametrize("most_queries", [1, 6], ids=["spans", "rows"])
@torch.inference_mode()
def test_only_the_last_layer_of_tokens_without_results_is_cut_short(
    dtype: str, results: list[int], most_queries: int
) -> None:
    """With `rows`, all spans are computed together, in one native call if there are no `turns`. In bf16, another way of
    computing a layer rounds differently, so each way is compared with itself."""
    decoder = random_decoder(dtype=dtype, head_dim=HEAD_DIM, num_layers=2)
    buffers = filled(decoder, (9, 6))
    spans = [BufferSpan(buffers[0], TokenRange(8, 9)), BufferSpan(buffers[1], TokenRange(0, 6))]
    ids = [5, 6, 7, 8, 9, 10, 11]
    atol = 2e-2 if dtype == "bfloat16" else 1e-5
    for turns in (None, Turns(lambda _: None)):
        num_together = most_queries if turns is None else 1
        whole_TD = decoder.forward(ids, spans, turns, most_queries=num_together)
        kv = [buffer.data.clone() for buffer in buffers]
        for span in spans:
            for layer in range(2):
                span.own(layer).zero_()
        found_RD = decoder.forward(ids, spans, turns, most_queries=num_together, results=results)
        assert found_RD.shape == (len(results), decoder.config.hidden_size)
        torch.testing.assert_close(found_RD, whole_TD[results], rtol=0.0, atol=atol)
        for buffer, before in zip(buffers, kv, strict=True):
            torch.testing.assert_close(buffer.data, before, rtol=0.0, atol=atol)
    assert turns is not None and turns.calls[-1] == "end 1"
