"""InfiniGen: partial keys that are always those of the keys at home, and picks that follow from them."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.errors import ModelError
from baton.modeling.forward.selection import Picks, Selection
from baton.modeling.kv.buffers import BufferSpan, KvBuffer
from baton.modeling.kv.row_memory import PagedMemory
from baton.modeling.sparse.bases import Basis, BasisKind
from baton.modeling.sparse.selection_file import save_prepared
from baton.types import KvLayout, SlotId, TokenRange
from generate_workers.config import EngineConfig, ResidencyName
from generate_workers.engine.memory_limits import make_memory
from generate_workers.residency.device import DeviceResidency
from generate_workers.residency.port import KvBytes, KvShape
from generate_workers.residency.sparse.infinigen import InfinigenResidency, InfinigenRow
from generate_workers.slots.kv_memory import KvMemory, MemoryLimits
from tests.support.engines.generation import Harness, harness, prompt
from tests.support.engines.infinigen import (
    DECODER,
    LAYERS,
    LAYOUT,
    LENGTHS,
    NUM_COLUMNS,
    PARAMS,
    SOME,
    infinigen,
    lookaheads,
    partial_of,
    prepared,
    random_basis,
)
from tests.support.engines.selective import Bench, lists
from tests.support.engines.slot_tables import page_bytes, whole_pages
from tests.support.models.tiny_models import random_decoder

GIB = 1 << 30


def whole_basis(layout: KvLayout) -> Basis:
    """All columns as they are: partial scores are the scores."""
    eye_LGHR = torch.eye(layout.head_dim).repeat(layout.num_layers, layout.num_kv_heads, 1, 1)
    return Basis(BasisKind.COLUMNS, eye_LGHR, eye_LGHR)


# What is chosen.


def scores_of(bench: Bench, q_NH: Tensor, layer: int, slot: int, num_keys: int) -> list[list[float]]:
    """S_g of the keys before the new token's, in float64, one after the other."""
    num_kv_heads = LAYOUT.num_kv_heads
    per_head = len(q_NH) // num_kv_heads
    k_SGH = bench.home(slot, layer)[:num_keys, 0].double()
    best = []
    for g in range(num_kv_heads):
        scores_JS = [
            [float(q_NH[h].double() @ k_SGH[j, g]) / math.sqrt(LAYOUT.head_dim) for j in range(num_keys)]
            for h in range(g * per_head, (g + 1) * per_head)
        ]
        best.append([max(row[j] - max(row) for row in scores_JS) for j in range(num_keys)])
    return best


@pytest.mark.parametrize("selection", [Selection(math.inf, 0.2, 0, 1), Selection(2.0, 0.5, 1, 2)])
def test_with_true_queries_and_all_columns_the_true_best_are_picked(selection: Selection) -> None:
    decoder = random_decoder(num_layers=5, dtype="bfloat16")  # keys that bf16 holds exactly, partial ones too
    found = prepared(selection, basis=whole_basis(decoder.layout), decoder=decoder)
    bench = Bench.of(decoder, infinigen(found, decoder), [prompt(length) for length in LENGTHS])
    _, watched = bench.run({slot: [5 + slot] for slot in range(len(LENGTHS))})
    for layer in LAYERS:
        for slot, length in enumerate(LENGTHS):
            close = scores_of(bench, watched.queries[layer][slot], layer, slot, length)
            mean = sum(sum(score > -selection.alpha for score in row) for row in close) / len(close)
            num_picks = min(max(math.ceil(mean), 1), max(1, math.floor(selection.most_share * (length + 1))), length)
            always = {*range(selection.num_first), *range(length + 1 - selection.num_last, length + 1)} - {-1}
            expected = [{*sorted(range(length), key=lambda j: (-row[j], j))[:num_picks], *always} for row in close]
            assert [set(keys) for keys in lists(watched.found[layer], slot)] == expected
    bench.close()


def test_with_lookahead_queries_are_those_that_the_layer_makes_of_the_input_before() -> None:
    """Picks of layer 3 are those of its own projection of what layer 2 ran on, at the token's position."""
    basis = random_basis(LAYOUT)
    bench = Bench.of(DECODER, infinigen(prepared(lookahead=1, basis=basis)), [prompt(40), prompt(61)])
    inputs: dict[int, Tensor] = {}
    residency = bench.residency
    with (
        torch.inference_mode(),
        residency.step([(SlotId(0), TokenRange(40, 41)), (SlotId(1), TokenRange(61, 62))]) as step,
    ):
        assert step.turns is not None
        turns = step.turns

        class Noting:
            def begin(self, layer: int, hidden_TD: Tensor) -> None:
                inputs[layer] = hidden_TD.clone()
                turns.begin(layer, hidden_TD)

            def picks(self, layer: int, q_TNH: Tensor) -> Picks | None:
                found[layer] = turns.picks(layer, q_TNH)
                return found[layer]

            def end(self, layer: int) -> None:
                turns.end(layer)

        found: dict[int, Picks | None] = {}
        DECODER.forward([5, 6], step.spans, Noting())
    for layer in LAYERS:
        for slot, length in enumerate((40, 61)):
            scratch = KvBuffer(LAYOUT, TokenRange(length, length + 1))
            turn = DECODER.begin([BufferSpan(scratch, scratch.tokens)])
            with torch.inference_mode():
                q_NH = DECODER.project(layer, inputs[layer - 1][slot : slot + 1], turn)[0]
            assert lists(found[layer], slot) == expected_picks(bench, basis, q_NH, layer, (slot, length))
    bench.close()


def expected_picks(bench: Bench, basis: Basis, q_NH: Tensor, layer: int, at: tuple[int, int]) -> list[list[int]]:
    """Picks by partial scores in fp64 of partial keys in bf16; `at`: slot and cached keys."""
    slot, length = at
    q_GJR = q_NH.double().view(LAYOUT.num_kv_heads, -1, LAYOUT.head_dim) @ basis.q_LGHR[layer].double()
    k_SGR = partial_of(bench.home(slot, layer)[:length, 0], basis, layer)
    score_GJS = q_GJR @ k_SGR.double().permute(1, 2, 0) / math.sqrt(LAYOUT.head_dim)
    close_GS = (score_GJS - score_GJS.amax(2, keepdim=True)).amax(1)
    count = math.ceil((close_GS > -SOME.alpha).sum().item() / len(close_GS))
    num_picks = min(max(count, 1), math.floor(SOME.most_share * (length + 1)))
    always = {0, 1, length - 2, length - 1, length}
    return [sorted({*row.sort(descending=True, stable=True).indices[:num_picks].tolist(), *always}) for row in close_GS]


# What is never touched.


@lookaheads
def test_what_is_not_picked_is_never_read(lookahead: int) -> None:
    """It is poisoned before the step: choosing does not look at it either."""
    prompts, asked = [prompt(40), prompt(61)], {0: [5], 1: [6]}
    calm, torn = (Bench.of(DECODER, infinigen(prepared(lookahead=lookahead)), prompts) for _ in range(2))
    expected, watched = calm.run(asked)
    num_poisoned = 0
    for slot, ids in enumerate(prompts):
        for layer in LAYERS:
            kept = lists(watched.found[layer], slot)
            for j, g in ((j, g) for j in range(len(ids)) for g in range(LAYOUT.num_kv_heads) if j not in kept[g]):
                torn.home(slot, layer)[j, :, g] = math.nan
                num_poisoned += 1
    found, _ = torn.run(asked)
    assert num_poisoned > 300
    assert torch.equal(found, expected)
    calm.close()
    torn.close()


# Partial keys.


def check_partial(made: Harness, basis: Basis) -> int:
    """Check the partial keys of every running row against its keys at home; return the number of rows."""
    rows = made.engine._running.rows.values()
    for row in rows:
        cached = row.num_cached
        kept = made.slots.memory.residency._rows[row.slot]  # type: ignore[attr-defined]
        assert isinstance(kept, InfinigenRow)
        for layer in LAYERS:
            keys_SGH = kept.kv(layer, TokenRange(0, cached))[:, 0]
            found_SGR = kept.partial.read(layer, cached)
            torch.testing.assert_close(found_SGR, partial_of(keys_SGH, basis, layer), atol=1e-6, rtol=2**-7)
    return len(rows)


@lookaheads
def test_partial_keys_are_those_of_the_keys_wherever_these_came_from(lookahead: int) -> None:
    found = prepared(lookahead=lookahead)
    params = replace(PARAMS, n=2, temperature=1.0, seed=3)
    with harness(decoder=DECODER, policy=infinigen(found), num_slots=8) as made:
        made.submit(prompt(40), PARAMS)  # in chunks
        made.submit(prompt(17), PARAMS)  # the last of them a single token
        ref = made.reserve(33, 60, num_choices=2).ref
        made.push_and_commit(ref, prompt(33), params)
        made.submit(prompt(33), params, ref=ref)
        num_looked = 0
        for _ in range(9):
            made.engine.step()
            num_looked += check_partial(made, found.basis)
        assert num_looked > 20
        made.run()


def test_partial_keys_come_back_with_rows_that_were_preempted() -> None:
    found = prepared()
    limits = MemoryLimits(page_bytes(40, LAYOUT) * 3 // 2)
    params = replace(PARAMS, max_tokens=40)
    with harness(decoder=DECODER, policy=infinigen(found), limits=limits, growth_tokens=1) as made:
        made.submit(prompt(8), params)
        made.submit(prompt(9), params)
        for _ in range(200):
            made.engine.step()
            check_partial(made, found.basis)
        made.run()
        assert made.engine.status().num_preemptions > 0


# Memory.


def test_memory_is_home_two_layers_and_partial_keys_on_the_device() -> None:
    bench = Bench.of(DECODER, infinigen(prepared()), [prompt(40)])
    partial = len(LAYERS) * whole_pages(3 * 16 * LAYOUT.num_kv_heads * NUM_COLUMNS * 2)
    layer = whole_pages(41 * LAYOUT.row_bytes)
    expected = KvBytes(LAYOUT.num_layers * layer, 2 * layer + partial)
    assert bench.residency.bytes_for(41) == expected
    bench.run({0: [5]})
    row = bench.residency._rows[0]  # type: ignore[attr-defined]
    assert row.num_bytes == expected
    assert (bench.residency.traits.is_exact, bench.residency.traits.name) == (False, "infinigen")
    bench.close()


def test_bytes_over_the_link_are_the_picked_rows() -> None:
    bench = Bench.of(DECODER, infinigen(prepared()), [prompt(40), prompt(61)])
    _, watched = bench.run({0: [5], 1: [6]})
    picked = [picks for picks in watched.found.values() if picks is not None]
    assert len(picked) == len(LAYERS)
    assert bench.residency.num_link_bytes == sum(int(each.num_BG.sum()) for each in picked) * 2 * LAYOUT.head_dim * 4
    bench.close()


def test_what_does_not_fit_on_a_device_of_1_gib_fits_with_partial_keys_there() -> None:
    """Shapes and dtype of SmolLM2-135M, 30 % of the columns; its weights take 269 MB in bf16."""
    layout = KvLayout("smollm2", num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16")
    shape = KvShape(layout, (None,) * 30, 8, 7600)
    limits = MemoryLimits(8 * GIB, GIB - 269_030_400)
    found = replace(prepared(), basis=random_basis(layout, num_columns=20))
    infinite = InfinigenResidency(shape, PagedMemory, found, DECODER)
    memory = KvMemory(infinite, shape, limits, growth_tokens=100)
    slots = [SlotId(slot) for slot in range(8)]
    for slot in slots:
        assert not memory.shortage(memory.need(7500, 7600))
        memory.promise([slot], 7500, 7600)
    assert memory.promised == infinite.bytes_for(7600) * 8
    device = KvMemory(DeviceResidency(shape, PagedMemory), shape, limits, growth_tokens=100)
    assert "device_memory_bytes leaves" in device.shortage(device.need(7500, 7600) * 8)


# As configured.


def test_a_group_is_made_from_what_was_prepared(tmp_path: Path) -> None:
    save_prepared(prepared(), tmp_path / "found.safetensors")
    config = EngineConfig(2, 64, residency="infinigen", selection_file=str(tmp_path / "found.safetensors"))
    memory = make_memory(DECODER, config)
    assert (memory.residency.traits.name, memory.residency.traits.is_exact) == ("infinigen", False)


@pytest.mark.parametrize("policy", ["infinigen", "infinigen_int4"])
def test_without_what_prepare_finds_out_a_group_is_refused(policy: ResidencyName, tmp_path: Path) -> None:
    config = EngineConfig(2, 64, residency=policy, selection_file=str(tmp_path / "none"))
    with pytest.raises(ModelError, match="none: no selection was prepared for this model: run `baton prepare`"):
        make_memory(DECODER, config)
