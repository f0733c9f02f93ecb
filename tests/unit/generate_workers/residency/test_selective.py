"""Policies that attend to some of the keys, those of the product and the comparators: what holds for all of them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from baton.errors import ConfigError
from baton.modeling.device.cpu import CpuDevice
from baton.modeling.forward.selection import Picks, Selection
from baton.modeling.kv.row_memory import PagedMemory
from generate_workers.residency.policies import make_residency
from generate_workers.residency.port import KvShape
from generate_workers.residency.sparse.pool import Eviction
from generate_workers.slots.kv_memory import MemoryLimits
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
from tests.support.engines.selective import Bench, MakePolicy, lists, oracle, streamed, window

Make = Callable[[Selection], MakePolicy]


def by_own_query(selection: Selection) -> MakePolicy:
    return infinigen(prepared(selection))


def by_guessed_query(selection: Selection) -> MakePolicy:
    return infinigen(prepared(selection, lookahead=1))


def int4_by_own_query(selection: Selection) -> MakePolicy:
    return infinigen_int4(prepared(selection))


def int4_by_guessed_query(selection: Selection) -> MakePolicy:
    return infinigen_int4(prepared(selection, lookahead=1))


exact = pytest.mark.parametrize("policy", [window, oracle, by_own_query, by_guessed_query])
"""Policies whose KV is not rounded."""
all_policies = pytest.mark.parametrize(
    "policy", [window, oracle, by_own_query, by_guessed_query, int4_by_own_query, int4_by_guessed_query]
)


@exact
def test_tokens_are_those_of_full_attention_when_all_keys_are_chosen(policy: Make) -> None:
    for length, token_ids in streamed(DECODER, policy(ALL)).items():
        assert token_ids == reference_ids(DECODER, prompt(length), PARAMS)


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


def test_without_kernels_for_the_keys_they_are_refused() -> None:
    layout = replace(LAYOUT, head_dim=8)
    with pytest.raises(
        ConfigError, match=r"residency = 'infinigen_int4' is not supported without kernels in C\+\+ for float32 .*8"
    ):
        make_residency("infinigen_int4", KvShape(layout, (None,) * 5, 1, 8), CpuDevice())


def test_models_with_windows_are_refused() -> None:
    with pytest.raises(ConfigError, match="'infinigen' is not supported for models with sliding windows"):
        make_residency("infinigen", KvShape(LAYOUT, (None, 8, None, 8, None), 1, 8), CpuDevice())
