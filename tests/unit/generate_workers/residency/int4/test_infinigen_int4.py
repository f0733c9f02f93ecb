"""InfiniGen over KV in 4 bits: its picks, of what KV was before; what it attends to, and nothing else, unpacked."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.errors import ConfigError, ModelError
from baton.modeling.device.cpu import CpuDevice
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.selection import Picks, Selection
from baton.modeling.sparse.selection_file import PreparedSelection, save_prepared
from baton.types import SlotId, TokenRange
from generate_workers.config import EngineConfig
from generate_workers.engine.memory_limits import make_memory
from generate_workers.residency.int4.format import Int4Format, has_int4_kernel
from generate_workers.residency.int4.int4_infinigen import ScoredInt4Row
from generate_workers.residency.int4.whole import Int4Residency
from generate_workers.residency.policies import SelectionSource, make_residency
from generate_workers.residency.port import KvBytes, KvShape
from generate_workers.residency.sparse.pool import PoolSize
from tests.support.engines.generation import prefilled, prompt
from tests.support.engines.infinigen import (
    ALL,
    DECODER,
    LAYERS,
    LAYOUT,
    LENGTHS,
    NUM_COLUMNS,
    infinigen,
    infinigen_int4,
    lookaheads,
    prepared,
)
from tests.support.engines.selective import Bench, Watched, lists, streamed
from tests.support.engines.slot_tables import whole_pages
from tests.support.kernels.int4 import there_and_back
from tests.support.models.tiny_models import random_decoder

pytestmark = pytest.mark.skipif(not has_int4_kernel(), reason="needs a C++ compiler")

FORM = Int4Format(LAYOUT)
PAIR_BYTES = 2 * FORM.head_bytes
"""Bytes of a kv head's K and V, packed."""
NUM_HEADS = LAYOUT.num_kv_heads


def row_of(bench: Bench, slot: int) -> ScoredInt4Row:
    row = bench.residency._rows[slot]  # type: ignore[attr-defined]
    assert isinstance(row, ScoredInt4Row)
    return row


def packed_of(bench: Bench, slot: int, layer: int) -> Tensor:
    """`[S, 2, G, W / 2]`: what a slot has of a layer at home, as fp16, whatever it means."""
    packed_S2GW = row_of(bench, slot).packed.memory.data_LS2GH[layer - LAYERS.start]
    assert packed_S2GW.dtype == torch.float16
    return packed_S2GW


# What is chosen, and attended to.


class Twins:
    """`infinigen_int4`, and `infinigen` whose home memory goes through 4 bits by itself, behind every step."""

    def __init__(self, found: PreparedSelection, prompts: Sequence[Sequence[int]], decoder: Decoder = DECODER) -> None:
        self.packed = Bench.of(decoder, infinigen_int4(found, decoder), prompts)
        self.plain = Bench.of(decoder, infinigen(found, decoder), prompts)
        self._form = Int4Format(decoder.layout)
        for slot, ids in enumerate(prompts):
            self._pack(slot, TokenRange(0, len(ids)))

    def run(self, fed: Mapping[int, Sequence[int]]) -> None:
        """One forward of both: the same picks and logits, and from then on the same partial keys."""
        starts = dict(self.plain.lengths)
        expected_TV, watched = self.plain.run(fed)
        found_TV, seen = self.packed.run(fed)
        num_rows = sum(len(ids) == 1 for ids in fed.values())
        for layer in LAYERS:
            for row in range(num_rows):
                assert lists(seen.found[layer], row) == lists(watched.found[layer], row)
        assert torch.equal(found_TV, expected_TV)
        for slot, ids in fed.items():
            self._pack(slot, TokenRange(starts[slot], starts[slot] + len(ids)))
            for layer in LAYERS:
                num_keys = self.plain.lengths[slot]
                mine, other = (bench.residency._rows[slot] for bench in (self.packed, self.plain))  # type: ignore[attr-defined]
                assert torch.equal(mine.partial.read(layer, num_keys), other.partial.read(layer, num_keys))

    def close(self) -> None:
        self.packed.close()
        self.plain.close()

    def _pack(self, slot: int, tokens: TokenRange) -> None:
        for layer in LAYERS:
            kv_T2GH = self.plain.home(slot, layer)[tokens.start : tokens.end]
            kv_T2GH.copy_(there_and_back(self._form, kv_T2GH))


@lookaheads
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_are_those_of_infinigen_over_what_was_packed(lookahead: int, dtype: str) -> None:
    """Keys are pushed, and come in steps and in longer spans; partial keys are made before they are packed."""
    decoder = random_decoder(num_layers=5, dtype=dtype)
    twins = Twins(prepared(lookahead=lookahead, decoder=decoder), [prompt(length) for length in LENGTHS], decoder)
    for number in range(9):
        twins.run({0: [number], 1: [3], 2: [9], 3: [4]} if number != 3 else {0: [1, 2], 1: [4], 2: list(range(5))})
    twins.close()


@pytest.mark.parametrize(("lookahead", "layers"), [(0, [2]), (1, [2, 3])])
def test_where_queries_are_the_same_so_are_picks(lookahead: int, layers: list[int]) -> None:
    """Until a layer has attended to what was packed; a guess is made a layer earlier."""
    prompts, asked = [prompt(40), prompt(61)], {0: [5], 1: [6]}
    plain = Bench.of(DECODER, infinigen(prepared(lookahead=lookahead)), prompts)
    bench = Bench.of(DECODER, infinigen_int4(prepared(lookahead=lookahead)), prompts)
    expected_BV, watched = plain.run(asked)
    found_BV, seen = bench.run(asked)
    for layer in layers:
        assert [lists(seen.found[layer], row) for row in asked] == [lists(watched.found[layer], row) for row in asked]
    error = (found_BV - expected_BV).square().mean().sqrt().item()
    assert 0 < error < 0.2 * expected_BV.std().item()
    plain.close()
    bench.close()


@lookaheads
def test_steps_are_those_of_int4_when_all_keys_are_chosen(lookahead: int) -> None:
    """The new token's included, which both attend to as it was."""
    prompts, asked = [prompt(length) for length in LENGTHS], {0: [5], 2: list(range(9)), 1: [6], 3: [8]}
    bench = Bench.of(DECODER, infinigen_int4(prepared(ALL, lookahead)), prompts)
    whole = Bench.of(DECODER, Int4Residency, prompts)
    torch.testing.assert_close(bench.run(asked)[0], whole.run(asked)[0], atol=1e-4, rtol=1e-5)
    bench.close()


@lookaheads
def test_streams_are_those_of_int4_when_all_keys_are_chosen(lookahead: int) -> None:
    assert streamed(DECODER, infinigen_int4(prepared(ALL, lookahead))) == streamed(DECODER, Int4Residency)


# What is never touched.


@lookaheads
def test_keys_that_are_not_picked_are_neither_unpacked_nor_read(lookahead: int) -> None:
    """It is poisoned at home before the step, and in the areas when all is unpacked."""
    prompts, asked = [prompt(40), prompt(61)], {0: [5], 1: [6]}
    calm, torn = (Bench.of(DECODER, infinigen_int4(prepared(lookahead=lookahead)), prompts) for _ in range(2))
    expected, watched = calm.run(asked)
    num_poisoned = 0
    for slot, ids in enumerate(prompts):
        for layer in LAYERS:
            kept = lists(watched.found[layer], slot)
            for j, g in ((j, g) for j in range(len(ids)) for g in range(NUM_HEADS) if j not in kept[g]):
                packed_of(torn, slot, layer)[j, :, g] = math.nan
                num_poisoned += 1

    def poison(layer: int, picks: Picks) -> None:
        for slot, ids in enumerate(prompts):
            area_S2GH, kept = row_of(torn, slot).area.memory.data_LS2GH[0], lists(picks, slot)
            for j, g in ((j, g) for j in range(len(ids)) for g in range(NUM_HEADS)):
                if j not in kept[g]:
                    area_S2GH[j, :, g] = math.nan
                else:
                    assert area_S2GH[j, :, g].isfinite().all()

    found, _ = torn.run(asked, poison)
    assert num_poisoned > 300
    assert torch.equal(found, expected)
    calm.close()
    torn.close()


@lookaheads
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("where", ["home", "area"])
def test_what_is_picked_is_read(lookahead: int, part: int, where: str) -> None:
    calm, torn = (Bench.of(DECODER, infinigen_int4(prepared(lookahead=lookahead)), [prompt(40)]) for _ in range(2))
    expected, watched = calm.run({0: [5]})
    key = lists(watched.found[3], 0)[1][-2]
    if where == "home":
        packed_of(torn, 0, 3)[key, part, 1].view(torch.uint8)[: LAYOUT.head_dim // 4] ^= 0xFF

    def change(layer: int, picks: Picks) -> None:
        if (where, layer) == ("area", 3):
            row_of(torn, 0).area.memory.data_LS2GH[0, key, part, 1] += 1

    assert not torch.equal(torn.run({0: [5]}, change)[0], expected)
    calm.close()
    torn.close()


def test_segments_of_a_row_hold_all_of_its_keys() -> None:
    """`baton evaluate --mass` reads them so, while the area has only some of them."""
    bench = Bench.of(DECODER, infinigen_int4(prepared()), [prompt(40)])
    kept, _ = prefilled(DECODER, prompt(40))
    with torch.inference_mode(), bench.residency.step([(SlotId(0), TokenRange(40, 41))]) as step:
        assert step.turns is not None
        [span] = step.spans
        num_looked = 0

        def look(layer: int, picks: Picks) -> None:
            nonlocal num_looked
            num_looked += 1
            rows = list(span.segments(layer))
            old_T2GH = there_and_back(FORM, kept.span(layer, TokenRange(0, 40)))
            assert [rows[0].first_position, rows[1].first_position, rows[1].end_position] == [0, 40, 41]
            assert torch.equal(torch.cat([each.k_SGH for each in rows]), torch.cat((old_T2GH, span.own(layer)))[:, 0])
            assert torch.equal(torch.cat([each.v_SGH for each in rows]), torch.cat((old_T2GH, span.own(layer)))[:, 1])

        DECODER.forward([5], step.spans, Watched(step.turns, look))
    assert num_looked == len(LAYERS)
    bench.close()


# What it takes.


def test_bytes_over_the_link_are_those_of_the_formula() -> None:
    """Picks, packed: of each list the new token's own goes home in place of coming. Longer spans come whole."""
    bench = Bench.of(DECODER, infinigen_int4(prepared()), [prompt(40), prompt(61), prompt(9)])
    rows = [(SlotId(0), TokenRange(40, 41)), (SlotId(1), TokenRange(61, 62)), (SlotId(2), TokenRange(9, 13))]
    with bench.residency.step(rows) as step:
        assert step.turns is not None
        watched = Watched(step.turns)
        with torch.inference_mode():
            DECODER.forward([1, 2, 3, 4, 5, 6], step.spans, watched)
        num_bytes_read = step.num_bytes_read
    picked = [picks for picks in watched.found.values() if picks is not None]
    num_picks = sum(int(picks.num_BG.sum()) for picks in picked)
    assert len(picked) == len(LAYERS)
    assert all(keys[-1] == last for picks in picked for row, last in ((0, 40), (1, 61)) for keys in lists(picks, row))
    packed_row = NUM_HEADS * PAIR_BYTES
    assert bench.residency.num_link_bytes == num_picks * PAIR_BYTES + len(LAYERS) * (9 + 4) * packed_row
    plain_row = LAYOUT.row_bytes
    whole = 2 * (41 + 62 + 13) + len(LAYERS) * 13
    assert num_bytes_read == num_picks * plain_row // NUM_HEADS + whole * plain_row
    bench.close()


def test_memory_is_what_is_packed_and_on_the_device_two_layers_partial_keys_and_the_area() -> None:
    bench = Bench.of(DECODER, infinigen_int4(prepared()), [prompt(40)])
    plain, packed = whole_pages(41 * LAYOUT.row_bytes), whole_pages(41 * NUM_HEADS * PAIR_BYTES)
    partial = len(LAYERS) * whole_pages(3 * 16 * NUM_HEADS * NUM_COLUMNS * 2)
    expected = KvBytes(2 * plain + len(LAYERS) * packed, 3 * plain + partial)
    assert bench.residency.bytes_for(41) == expected
    bench.run({0: [5]})
    assert row_of(bench, 0).num_bytes == expected
    assert (bench.residency.traits.is_exact, bench.residency.traits.name) == (False, "infinigen_int4")
    bench.close()


def test_a_copy_goes_on_as_its_source() -> None:
    bench = Bench.of(DECODER, infinigen_int4(prepared()), [prompt(40), prompt(3)])
    for number in range(3):
        bench.run({0: [number]})
    bench.copy(0, 1)
    for number in range(8):
        logits_BV, watched = bench.run({0: [number], 1: [number]})
        assert torch.equal(logits_BV[0], logits_BV[1])
        assert all(lists(watched.found[layer], 0) == lists(watched.found[layer], 1) for layer in LAYERS)
    assert row_of(bench, 0).num_bytes == row_of(bench, 1).num_bytes
    bench.close()


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_model_of_whole_layers_alone_is_full_attention(num_layers: int) -> None:
    decoder = random_decoder(num_layers=num_layers)
    found = prepared(Selection(0.1, 0.01, 0, 1), decoder=decoder)
    bench = Bench.of(decoder, infinigen_int4(found, decoder), [prompt(20)])
    logits_TV, _ = bench.run({0: [5]})
    torch.testing.assert_close(logits_TV, prefilled(decoder, [*prompt(20), 5])[1][-1:], atol=1e-4, rtol=1e-5)
    assert bench.residency.num_link_bytes == 0
    bench.close()


# As configured.


def test_a_group_is_made_from_what_was_prepared(tmp_path: Path) -> None:
    save_prepared(prepared(), tmp_path / "found.safetensors")
    config = EngineConfig(2, 64, residency="infinigen_int4", selection_file=str(tmp_path / "found.safetensors"))
    memory = make_memory(DECODER, config)
    assert (memory.residency.traits.name, memory.residency.traits.is_exact) == ("infinigen_int4", False)
    with pytest.raises(ModelError, match="none: no selection was prepared for this model: run `baton prepare`"):
        make_memory(DECODER, replace(config, selection_file=str(tmp_path / "none")))


def test_int4_with_a_pool_is_refused() -> None:
    shape, cpu = KvShape(LAYOUT, DECODER.config.windows, 2, 64), CpuDevice()
    with pytest.raises(ConfigError, match="residency = 'infinigen_int4' keeps all KV: leave pool_tokens at 0"):
        make_residency("infinigen_int4", shape, cpu, SelectionSource(DECODER, None, PoolSize(20)))
