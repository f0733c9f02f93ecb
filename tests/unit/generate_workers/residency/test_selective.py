"""Policies that attend to some of the keys: what they choose, what they never touch, and what they say of it."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from baton.errors import ConfigError
from baton.ids import SlotId
from baton.types import TokenRange
from generate_workers.residency.policies import make_residency
from generate_workers.residency.port import KvBytes, KvShape
from generate_workers.residency.sparse.oracle import OracleResidency, best_keys
from generate_workers.residency.sparse.pool import Eviction
from generate_workers.residency.sparse.window import WindowResidency, first_and_last
from generate_workers.slots.memory import MemoryLimits
from modeling.device.cpu import CpuDevice
from modeling.forward.selection import Picks, Selection
from modeling.kv.memory import PagedMemory
from tests.support.engines.generation import harness, prompt, reference_ids
from tests.support.engines.infinigen import (
    ALL,
    DECODER,
    LAYERS,
    LAYOUT,
    LENGTHS,
    PARAMS,
    SOME,
    infinigen,
    infinigen_int4,
    pooled,
    prepared,
)
from tests.support.engines.selective import Bench, MakePolicy, Watched, lists, streamed
from tests.support.engines.slot_tables import whole_pages

Make = Callable[[Selection], MakePolicy]


def window(selection: Selection) -> MakePolicy:
    return lambda shape, make: WindowResidency(shape, make, selection)


def oracle(selection: Selection) -> MakePolicy:
    return lambda shape, make: OracleResidency(shape, make, selection)


def by_own_query(selection: Selection) -> MakePolicy:
    return infinigen(prepared(selection))


def by_guessed_query(selection: Selection) -> MakePolicy:
    return infinigen(prepared(selection, lookahead=1))


def int4_by_own_query(selection: Selection) -> MakePolicy:
    return infinigen_int4(prepared(selection))


def int4_by_guessed_query(selection: Selection) -> MakePolicy:
    return infinigen_int4(prepared(selection, lookahead=1))


policies = pytest.mark.parametrize("policy", [window, oracle])
exact = pytest.mark.parametrize("policy", [window, oracle, by_own_query, by_guessed_query])
"""Policies whose KV is not rounded."""
all_policies = pytest.mark.parametrize(
    "policy", [window, oracle, by_own_query, by_guessed_query, int4_by_own_query, int4_by_guessed_query]
)


# What is chosen.


@exact
def test_tokens_are_those_of_full_attention_when_all_keys_are_chosen(policy: Make) -> None:
    for length, token_ids in streamed(DECODER, policy(ALL)).items():
        assert token_ids == reference_ids(DECODER, prompt(length), PARAMS)


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


@all_policies
def test_what_a_row_picks_does_not_depend_on_its_batch(policy: Make) -> None:
    prompts = [prompt(length) for length in LENGTHS]
    together = Bench.of(DECODER, policy(SOME), prompts)
    logits_TV, watched = together.run({0: [5], 2: list(range(9)), 1: [6], 3: [8]})
    for slot, row, token in ((0, 0, 0), (1, 1, 10), (3, 2, 11)):
        alone = Bench.of(DECODER, policy(SOME), [prompts[slot]])
        alone_V, seen = alone.run({0: [{0: 5, 1: 6, 3: 8}[slot]]})
        for layer in LAYERS:
            assert lists(seen.found[layer], 0) == lists(watched.found[layer], row)
        torch.testing.assert_close(alone_V[0], logits_TV[token], atol=1e-4, rtol=1e-5)
        alone.close()
    together.close()


@policies
def test_longer_spans_attend_to_all(policy: Make) -> None:
    full = reference_ids(DECODER, prompt(61), replace(PARAMS, max_tokens=1))
    with harness(decoder=DECODER, policy=policy(Selection(0.1, 0.01, 0, 1)), max_prefill_tokens_per_step=25) as made:
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


@exact
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_what_is_picked_is_read(policy: Make, part: int) -> None:
    calm, torn = (Bench.of(DECODER, policy(SOME), [prompt(40)]) for _ in range(2))

    def change(layer: int, picks: Picks) -> None:
        if layer == 3:
            torn.home(0, layer)[lists(picks, 0)[1][-2], part, 1] += 1

    assert not torch.equal(torn.run({0: [5]}, change)[0], calm.run({0: [5]})[0])
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


@pytest.mark.parametrize("policy", [pooled(24, Eviction.LRU), infinigen_int4(prepared())], ids=["pooled", "int4"])
def test_choices_preemptions_and_long_prompts_end_well(policy: MakePolicy) -> None:
    """Everything that an engine does, beside rows that never evict; KV is never more than what was promised."""
    params = replace(PARAMS, max_tokens=40)
    residency = policy(KvShape(LAYOUT, DECODER.config.windows, 1, 128), PagedMemory)
    limits = MemoryLimits(residency.bytes_for(100).home * 2)
    with harness(decoder=DECODER, policy=policy, limits=limits, growth_tokens=1) as made:
        made.submit(prompt(60), replace(params, n=2, temperature=1.0, seed=3))
        made.submit(prompt(50), params)
        made.submit(prompt(9), params)
        ref = made.reserve(17, 60).ref
        made.push_and_commit(ref, prompt(17), params)
        made.submit(prompt(17), params, ref=ref)
        for _ in range(400):
            made.engine.step()
            ledger = made.slots.ledger()
            assert ledger.num_bytes_held <= ledger.kv.num_bytes_taken <= limits.kv_bytes
        made.run()
        assert made.engine.status().num_preemptions > 0


# Where they cannot be.


def test_without_kernels_for_the_keys_they_are_refused() -> None:
    layout = replace(LAYOUT, head_dim=8)
    with pytest.raises(
        ConfigError, match=r"residency = 'window' is not there without kernels in C\+\+ for float32 .*8"
    ):
        make_residency("window", KvShape(layout, (None,) * 5, 1, 8), CpuDevice())


def test_models_with_windows_are_refused() -> None:
    with pytest.raises(ConfigError, match="'infinigen' is not there for models with sliding windows"):
        make_residency("infinigen", KvShape(LAYOUT, (None, 8, None, 8, None), 1, 8), CpuDevice())
