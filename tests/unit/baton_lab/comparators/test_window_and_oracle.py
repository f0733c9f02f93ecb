"""Residencies `window` and `oracle`: what they choose, what they never touch, and what they say of it."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from baton.modeling.forward.selection import Picks, Selection
from baton.types import SlotId, TokenRange
from baton_lab.comparators.oracle import best_keys
from baton_lab.comparators.window import first_and_last
from generate_workers.residency.port import KvBytes
from tests.support.engines.generation import harness, prompt, reference_ids
from tests.support.engines.infinigen import DECODER, LAYERS, LAYOUT, LENGTHS, PARAMS, SOME
from tests.support.engines.selective import Bench, MakePolicy, Watched, lists, oracle, window
from tests.support.engines.slot_tables import whole_pages

Make = Callable[[Selection], MakePolicy]
policies = pytest.mark.parametrize("policy", [window, oracle])


# What is chosen.


def naive_best(bench: Bench, watched: Watched, layer: int, at: tuple[int, int], selection: Selection) -> list[set[int]]:
    """In float64, one score after the other; `at`: the row among the step's, and its slot."""
    row, slot = at
    num_heads, num_kv_heads = DECODER.config.num_heads, DECODER.config.num_kv_heads
    num_keys, q_NH = bench.lengths[slot], watched.queries[layer][row].double()
    k_SGH = bench.home(slot, layer)[:num_keys, 0].double()
    best: list[list[float]] = []
    for g in range(num_kv_heads):
        heads = range(g * num_heads // num_kv_heads, (g + 1) * num_heads // num_kv_heads)
        scores = [[float(q_NH[h] @ k_SGH[j, g]) / math.sqrt(LAYOUT.head_dim) for j in range(num_keys)] for h in heads]
        best.append([max(row[j] - max(row) for row in scores) for j in range(num_keys)])
    mean = sum(sum(score > -selection.alpha for score in row) for row in best) / num_kv_heads
    most = max(math.floor(selection.most_share * num_keys), selection.free_keys)
    num_picks = max(min(math.ceil(mean), most), 1)
    always = {*range(min(selection.num_first, num_keys)), *range(max(num_keys - selection.num_last, 0), num_keys)}
    return [{*sorted(range(num_keys), key=lambda j: (-row[j], j))[:num_picks], *always} for row in best]


@pytest.mark.parametrize("free_keys", [1, 10])
def test_the_oracle_picks_the_true_best(free_keys: int) -> None:
    selection = replace(SOME, free_keys=free_keys)
    bench = Bench.of(DECODER, oracle(selection), [prompt(length) for length in LENGTHS])
    _, watched = bench.run({slot: [5 + slot] for slot in range(len(LENGTHS))})
    assert (watched.found[0], watched.found[1]) == (None, None)
    for layer in LAYERS:
        for slot in range(len(LENGTHS)):
            expected = naive_best(bench, watched, layer, (slot, slot), selection)
            found = lists(watched.found[layer], slot)
            assert [set(keys) for keys in found] == expected
            assert all(keys == sorted(set(keys)) for keys in found)
    bench.close()


def test_of_equal_scores_the_earlier_key_is_taken() -> None:
    scores_GS = torch.tensor([[-1.0, 0.0, -1.0, -1.0, -2.0, -9.0]])
    [keys] = best_keys(scores_GS, Selection(math.inf, 0.5, 0, 1))
    assert keys.tolist() == [0, 1, 2, 5]


@pytest.mark.parametrize("length", [1, 2, 5, 6, 30, 31])
def test_a_window_is_the_first_keys_and_as_many_latest_as_others_choose(length: int) -> None:
    selection = Selection(4.0, 0.3, 2, 3)
    picks = first_and_last(torch.tensor([length, 40], dtype=torch.int32), selection, num_kv_heads=2)
    num_latest = max(3, math.floor(0.3 * length))
    expected = sorted({*range(min(2, length)), *range(max(length - num_latest, 0), length)})
    assert lists(picks, 0) == [expected] * 2
    assert lists(picks, 1) == [[0, 1, *range(28, 40)]] * 2
    assert picks.keys_BGK.is_contiguous()
    assert picks.num_BG.is_contiguous()
    picks = first_and_last(torch.tensor([length], dtype=torch.int32), replace(selection, free_keys=20), 1)
    assert lists(picks, 0) == [sorted({*range(min(2, length)), *range(max(length - 20, 0), length)})]


@policies
def test_longer_spans_attend_to_all(policy: Make) -> None:
    full = reference_ids(DECODER, prompt(61), replace(PARAMS, max_tokens=1))
    with harness(decoder=DECODER, policy=policy(Selection(0.1, 0.01, 0, 1)), max_batched_tokens=25) as made:
        assert made.answer(prompt(61), replace(PARAMS, max_tokens=1)).token_ids == full


# What is never touched.


def unpicked(bench: Bench, layer: int, row: int, slot: int, picks: Picks) -> list[tuple[int, int]]:
    """`(key, kv head)` of all that a slot's row does not attend to."""
    kept = lists(picks, row)
    heads = range(LAYOUT.num_kv_heads)
    return [(j, g) for g in heads for j in range(bench.lengths[slot] + 1) if j not in kept[g]]


@policies
def test_what_is_not_picked_is_not_read(policy: Make) -> None:
    prompts = [prompt(40), prompt(61)]
    asked = {0: [5], 1: [6]}
    calm, torn = (Bench.of(DECODER, policy(SOME), prompts) for _ in range(2))
    num_poisoned = 0

    def poison(layer: int, picks: Picks) -> None:
        nonlocal num_poisoned
        for slot in asked:
            for j, g in unpicked(torn, layer, slot, slot, picks):
                torn.home(slot, layer)[j, :, g] = math.nan
                num_poisoned += 1

    expected, _ = calm.run(asked)
    found, _ = torn.run(asked, poison)
    assert num_poisoned > 100
    assert torch.equal(found, expected)
    calm.close()
    torn.close()


# What they say of it.


def test_bytes_are_those_of_the_formula() -> None:
    bench = Bench.of(DECODER, window(SOME), [prompt(40), prompt(61), prompt(9)])
    residency = bench.residency
    with residency.step([(SlotId(0), TokenRange(40, 41)), (SlotId(2), TokenRange(9, 13))]) as step:
        assert step.turns is not None
        watched = Watched(step.turns)
        with torch.inference_mode():
            DECODER.forward([1, 2, 3, 4, 5], step.spans, watched)
        num_bytes_read = step.num_bytes_read
    picked = [picks for picks in watched.found.values() if picks is not None]
    rows = sum(int(picks.num_BG.sum()) for picks in picked) * 2 * LAYOUT.head_dim * 4
    assert len(picked) == len(LAYERS)
    assert rows == len(LAYERS) * LAYOUT.num_kv_heads * (2 + 8) * 2 * LAYOUT.head_dim * 4
    assert residency.num_link_bytes == rows + len(LAYERS) * 9 * LAYOUT.row_bytes
    assert num_bytes_read == rows + (2 * 41 + LAYOUT.num_layers * 13) * LAYOUT.row_bytes
    bench.close()


def test_the_oracle_counts_all_keys_as_read() -> None:
    bench = Bench.of(DECODER, oracle(SOME), [prompt(40)])
    bench.run({0: [5]})
    assert bench.residency.num_link_bytes == len(LAYERS) * 41 * LAYOUT.row_bytes
    bench.close()


@policies
def test_memory_is_home_and_two_layers_on_the_device(policy: Make) -> None:
    bench = Bench.of(DECODER, policy(SOME), [prompt(40)])
    layer = whole_pages(41 * LAYOUT.row_bytes)
    assert bench.residency.bytes_for(41) == KvBytes(LAYOUT.num_layers * layer, 2 * layer)
    bench.run({0: [5]})
    row = bench.residency._rows[0]  # type: ignore[attr-defined]
    assert row.num_bytes == bench.residency.bytes_for(41)
    assert (bench.residency.traits.is_exact, bench.residency.traits.name) == (False, policy.__name__)
    bench.close()


@policies
def test_choices_share_a_prompt_and_all_is_given_back(policy: Make) -> None:
    with harness(decoder=DECODER, policy=policy(SOME)) as made:
        made.submit(prompt(40), replace(PARAMS, n=3, temperature=1.0, seed=3))
        made.submit(prompt(23), PARAMS)
        for _ in range(6):
            made.engine.step()
        assert made.slots.ledger().num_device_bytes > 0
        made.run()
        stats = made.engine.status().last_step
        assert stats is not None
        assert stats.num_link_bytes > 0
