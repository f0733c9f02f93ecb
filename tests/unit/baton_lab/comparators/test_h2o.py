"""H2O against lists and floats of Python: sums of all queries, who is dropped, and that nobody comes back."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.errors import ConfigError
from baton.modeling.kv.buffers import BufferSpan, KvBuffer
from baton.types import SlotId, TokenRange
from baton_lab.comparators.h2o import H2oResidency
from baton_lab.comparators.heavy_hitters import HeavyBudget, HeavyHitters
from generate_workers.residency.device import DeviceResidency
from generate_workers.residency.port import KvBytes, KvShape, Residency
from tests.support.engines.devices import PoisonedMemory
from tests.support.engines.generation import prefilled, prompt
from tests.support.kernels.paths import needs_rows
from tests.support.models.tiny_models import random_decoder

SLOT, OTHER = SlotId(0), SlotId(1)
DECODER = random_decoder(num_layers=4)
NUM_PROMPT, NUM_ALL = 40, 64
IDS = prompt(NUM_ALL)
BUDGET = HeavyBudget(0.2, 0.15)
EVERYTHING = HeavyBudget(1.0, 1.0)


class ReferenceHead:
    """One kv head of one layer of one row, in lists and floats."""

    def __init__(self) -> None:
        self.keys: list[list[float]] = []
        self.sums: dict[int, float] = {}
        """Sums of the kept keys, by position."""

    def query(self, key: list[float], queries: list[list[float]]) -> list[int]:
        """A token with its key, and its queries of all heads that share it; the positions that they attend to."""
        self.sums[len(self.keys)] = 0.0
        self.keys.append(key)
        seen = sorted(self.sums)
        for query in queries:
            scores = [
                sum(a * b for a, b in zip(query, self.keys[at], strict=True)) / math.sqrt(len(key)) for at in seen
            ]
            weights = [math.exp(score - max(scores)) for score in scores]
            for at, weight in zip(seen, weights, strict=True):
                self.sums[at] += weight / sum(weights)
        return seen

    def drop(self, num_heavy: int, num_recent: int) -> None:
        while len(self.sums) > num_heavy + num_recent:
            others = sorted(self.sums)[: len(self.sums) - num_recent]
            del self.sums[min(others, key=lambda at: self.sums[at])]


def random_trace(num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """`(q_TNH, k_SGH)` of 2 kv heads that two heads share each; attention is not flat."""
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(num_tokens, 4, 8, generator=generator), torch.randn(num_tokens, 2, 8, generator=generator)


def check_same(hitters: HeavyHitters, heads: list[ReferenceHead]) -> None:
    for positions_K, sums_K, head in zip(hitters.positions_GK, hitters.sums_GK, heads, strict=True):
        assert positions_K.tolist() == sorted(head.sums)
        assert sums_K.tolist() == pytest.approx([head.sums[at] for at in sorted(head.sums)], rel=1e-4)


# What a layer keeps.


@settings(max_examples=40, deadline=None, derandomize=True)  # fp32 may take a near tie the other way
@given(
    num_prompt=st.integers(1, 90),
    chunk=st.integers(1, 70),
    num_steps=st.integers(0, 25),
    num_heavy=st.integers(0, 9),
    num_recent=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_a_random_trace_is_that_of_lists(
    *, num_prompt: int, chunk: int, num_steps: int, num_heavy: int, num_recent: int, seed: int
) -> None:
    """A prompt in chunks, then steps. Also: the latest keys are always there, and what was dropped never is again."""
    q_TNH, k_SGH = random_trace(num_prompt + num_steps, seed)
    hitters, heads = HeavyHitters(2), [ReferenceHead(), ReferenceHead()]
    parts = [*TokenRange(0, num_prompt).split(chunk), *TokenRange(num_prompt, num_prompt + num_steps).split(1)]
    dropped: list[set[int]] = [set(), set()]
    seen: list[list[int]] = []
    for part in parts:
        weighed_GK = hitters.take(q_TNH[part.start : part.end], k_SGH[: part.end])
        for position in range(part.start, part.end):
            seen = [
                head.query(k_SGH[position, g].tolist(), q_TNH[position, 2 * g : 2 * g + 2].tolist())
                for g, head in enumerate(heads)
            ]
        assert weighed_GK.tolist() == seen
        check_same(hitters, heads)
        if part.end >= num_prompt:
            hitters.drop(num_heavy, num_recent)
            for head in heads:
                head.drop(num_heavy, num_recent)
        check_same(hitters, heads)
        for positions_K, gone in zip(hitters.positions_GK, dropped, strict=True):
            kept = set(positions_K.tolist())
            assert not gone & kept
            assert kept >= set(range(max(part.end - num_recent, 0), part.end))
            gone |= set(range(part.end)) - kept


def test_sums_are_the_number_of_queries() -> None:
    """While nothing is dropped: each of two heads gives each token's weights, which are 1 in all."""
    q_TNH, k_SGH = random_trace(150, 1)
    hitters = HeavyHitters(2)
    for part in TokenRange(0, 150).split(70):
        hitters.take(q_TNH[part.start : part.end], k_SGH[: part.end])
        assert hitters.sums_GK.sum(1).tolist() == pytest.approx([2 * part.end] * 2, rel=1e-5)


def test_of_equal_sums_the_earlier_keys_go() -> None:
    hitters = HeavyHitters(1)
    hitters.take(torch.zeros(6, 1, 8), torch.zeros(6, 1, 8))
    hitters.sums_GK = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 0.0]])
    hitters.drop(num_heavy=2, num_recent=1)
    assert hitters.positions_GK.tolist() == [[1, 3, 5]]
    hitters.drop(num_heavy=1, num_recent=1)
    assert hitters.positions_GK.tolist() == [[3, 5]]


def test_a_key_that_matters_late_is_gone() -> None:
    """H2O's weakness, which must be there: nobody looks at key 3 for 50 steps; then a query wants nothing else."""
    k_SGH, q_TNH = torch.zeros(60, 1, 8), torch.zeros(60, 1, 8)
    k_SGH[:, 0, 1] = q_TNH[:, 0, 1] = 5.0
    k_SGH[3] = q_TNH[-1] = torch.tensor([5.0, *[0.0] * 7])
    hitters = HeavyHitters(1)
    hitters.take(q_TNH[:10], k_SGH[:10])
    for end in range(11, 61):
        hitters.drop(4, 3)
        hitters.take(q_TNH[end - 1 : end], k_SGH[:end])
    assert 3 not in hitters.positions_GK[0].tolist()
    whole = HeavyHitters(1)
    whole.take(q_TNH[:59], k_SGH[:59])
    before_K = whole.sums_GK[0]
    whole.take(q_TNH[59:], k_SGH)
    assert whole.sums_GK[0, 3] - before_K[3] > 0.99


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (HeavyBudget(0.1, 0.1), (10, 10)),
        (HeavyBudget(0.25, 0.001), (25, 1)),
        (HeavyBudget.halved(0.4), (20, 20)),
    ],
)
def test_a_budget_is_a_part_of_the_prompt(budget: HeavyBudget, expected: tuple[int, int]) -> None:
    assert budget.of(100) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heavy_share": -0.1}, "heavy_share = -0.1 is out of range: use a number from 0 to 1"),
        ({"heavy_share": 1.5}, "heavy_share = 1.5 is out of range"),
        ({"recent_share": 0.0}, "recent_share = 0.0 is out of range: use a number above 0, up to 1"),
    ],
)
def test_a_budget_out_of_its_limits_is_a_config_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HeavyBudget(**{"heavy_share": 0.1, "recent_share": 0.1} | changes)


# The policy.


def make(budget: HeavyBudget = BUDGET) -> H2oResidency:
    shape = KvShape(DECODER.layout, DECODER.config.windows, 2, 128)
    return H2oResidency(shape, PoisonedMemory, DECODER, budget)


def push(
    residency: Residency, num_prompt: int, slot: SlotId = SLOT, ids: Sequence[int] = IDS, num_pushed: int | None = None
) -> None:
    """The KV of a prompt, or of its first tokens, in pieces."""
    buffer, _ = prefilled(DECODER, ids[:num_prompt])
    row = residency.open(slot, num_prompt, 128)
    for layer in range(DECODER.layout.num_layers):
        for tokens in TokenRange(0, num_pushed or num_prompt).split(7):
            row.write(layer, tokens, buffer.export(layer, tokens)).result()


@torch.inference_mode()
def run(residency: Residency, parts: Sequence[TokenRange], ids: Sequence[int] = IDS, slot: SlotId = SLOT) -> Tensor:
    """A forward for each part; the logits of all their tokens, `[T, V]`."""
    found = []
    for tokens in parts:
        with residency.step([(slot, tokens)]) as step:
            hidden_TD = DECODER.forward(ids[tokens.start : tokens.end], step.spans, step.turns)
            found.append(DECODER.logits(hidden_TD))
    return torch.cat(found)


def steps(start: int, end: int) -> list[TokenRange]:
    return TokenRange(start, end).split(1)


@torch.inference_mode()
def reference_logits(budget: HeavyBudget) -> tuple[Tensor, list[list[ReferenceHead]]]:
    """Of the tokens behind the prompt `[T, V]`, and what is kept in the end, by layer: one token at a time through the
    decoder's parts, with attention in fp64 to what lists say."""
    layout = DECODER.layout
    buffer = KvBuffer(layout, TokenRange(0, NUM_ALL))
    heads = [[ReferenceHead() for _ in range(layout.num_kv_heads)] for _ in range(layout.num_layers)]
    found = []
    for position in range(NUM_ALL):
        step = DECODER.begin([BufferSpan(buffer, TokenRange(position, position + 1))])
        hidden_1D = DECODER.embed([IDS[position]], step)
        for layer in range(layout.num_layers):
            q_GJH = DECODER.project(layer, hidden_1D, step).view(layout.num_kv_heads, -1, layout.head_dim).double()
            outs = []
            for g, head in enumerate(heads[layer]):
                k_SH, v_SH = buffer.data[layer, : position + 1, :, g].double().unbind(1)
                seen = head.query(k_SH[position].tolist(), q_GJH[g].tolist())
                outs.append((q_GJH[g] @ k_SH[seen].T / math.sqrt(layout.head_dim)).softmax(-1) @ v_SH[seen])
                if position + 1 >= NUM_PROMPT and layer >= 2:
                    num_heavy, num_recent = budget.of(NUM_PROMPT)
                    head.drop(num_heavy, num_recent - 1)
            hidden_1D = DECODER.complete(layer, hidden_1D, torch.cat(outs).float().unsqueeze(0))
        found.append(DECODER.logits(hidden_1D))
    return torch.cat(found[NUM_PROMPT:]), heads


@needs_rows
@pytest.mark.parametrize("way", ["pushed", "whole", "chunks", "single", "cached"])
def test_logits_are_those_of_lists_however_the_prompt_came(way: str) -> None:
    residency = make()
    whole = TokenRange(0, NUM_PROMPT)
    if way == "pushed":
        push(residency, NUM_PROMPT)
    elif way == "cached":  # the last 15 run here, behind what came from elsewhere
        push(residency, NUM_PROMPT, num_pushed=25)
        run(residency, [TokenRange(25, NUM_PROMPT)])
    else:
        residency.open(SLOT, NUM_PROMPT, 128)
        run(residency, {"whole": [whole], "chunks": whole.split(13), "single": whole.split(1)}[way])
    got_TV = run(residency, steps(NUM_PROMPT, NUM_ALL))
    expected_TV, heads = reference_logits(BUDGET)
    torch.testing.assert_close(got_TV, expected_TV, atol=2e-4, rtol=2e-4)
    for layer in range(2, DECODER.layout.num_layers):
        check_same(residency._rows[SLOT].index.hitters[layer], heads[layer])
    residency._rows[SLOT].release()


@needs_rows
def test_a_budget_of_everything_is_full_attention() -> None:
    shape = KvShape(DECODER.layout, DECODER.config.windows, 1, 128)
    full, residency = DeviceResidency(shape, PoisonedMemory), make(EVERYTHING)
    for each in (full, residency):
        push(each, NUM_PROMPT)
    parts = steps(NUM_PROMPT, NUM_ALL)
    torch.testing.assert_close(run(residency, parts), run(full, parts), atol=1e-5, rtol=1e-5)


@needs_rows
def test_what_was_dropped_is_never_read() -> None:
    """NaN in all of it, in every step, changes nothing."""
    calm, residency = make(), make()
    for each in (calm, residency):
        push(each, NUM_PROMPT)
    row = residency._rows[SLOT]
    for tokens in steps(NUM_PROMPT, NUM_ALL):
        expected = run(calm, [tokens])
        for layer in range(2, DECODER.layout.num_layers) if tokens.start > NUM_PROMPT else ():
            for g, positions_K in enumerate(row.index.hitters[layer].positions_GK):
                is_gone_S = torch.ones(tokens.start, dtype=torch.bool)
                is_gone_S[positions_K.long()] = False
                row.kv(layer, TokenRange(0, tokens.start))[is_gone_S, :, g] = torch.nan
        assert torch.equal(run(residency, [tokens]), expected)
    assert row.kv(3, TokenRange(0, NUM_PROMPT)).isnan().any()


@needs_rows
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_what_is_kept_is_read(part: int) -> None:
    """Every kept key, one at a time."""
    calm = make()
    push(calm, NUM_PROMPT)
    expected = run(calm, steps(NUM_PROMPT, NUM_PROMPT + 2))[1]
    kept = calm._rows[SLOT].index.hitters[3].positions_GK[1].tolist()
    assert len(kept) < NUM_PROMPT // 2
    for position in kept[:-1]:  # those that the last of these steps attended to, but its own
        residency = make()
        push(residency, NUM_PROMPT)
        run(residency, steps(NUM_PROMPT, NUM_PROMPT + 1))
        residency._rows[SLOT].kv(3, TokenRange(position, position + 1))[0, part, 1] += 1
        assert not torch.equal(run(residency, steps(NUM_PROMPT + 1, NUM_PROMPT + 2))[0], expected)


@needs_rows
def test_a_row_keeps_the_same_alone_and_among_others() -> None:
    alone, together = make(), make()
    for residency in (alone, together):
        push(residency, NUM_PROMPT)
    other_ids = prompt(90, seed=7)
    push(together, 70, OTHER, other_ids)
    run(alone, steps(NUM_PROMPT, NUM_PROMPT + 8))
    for at in range(8):
        rows = [
            (OTHER, TokenRange(70 + at, 71 + at)),
            (SLOT, TokenRange(NUM_PROMPT + at, NUM_PROMPT + at + 1)),
        ]
        with torch.inference_mode(), together.step(rows) as step:
            DECODER.forward([other_ids[70 + at], IDS[NUM_PROMPT + at]], step.spans, step.turns)
    for layer in range(2, DECODER.layout.num_layers):
        one, same = alone._rows[SLOT].index.hitters[layer], together._rows[SLOT].index.hitters[layer]
        assert one.positions_GK.tolist() == same.positions_GK.tolist()
        torch.testing.assert_close(one.sums_GK, same.sums_GK, atol=1e-4, rtol=1e-4)


@needs_rows
def test_a_copy_goes_on_alike_and_a_pushed_prompt_runs_once_for_all() -> None:
    residency = make()
    push(residency, NUM_PROMPT)
    residency.open(OTHER, NUM_PROMPT, 128)
    residency.copy(SLOT, OTHER, NUM_PROMPT)
    assert [residency._rows[slot].index.num_weighed for slot in (SLOT, OTHER)] == [NUM_PROMPT] * 2
    parts = steps(NUM_PROMPT, NUM_ALL)
    assert torch.equal(run(residency, parts), run(residency, parts, slot=OTHER))


@needs_rows
def test_bytes_are_those_of_the_formula() -> None:
    layout, residency = DECODER.layout, make(HeavyBudget(0.5, 0.25))
    push(residency, NUM_PROMPT)
    run(residency, steps(NUM_PROMPT, NUM_PROMPT + 1))
    before = residency.num_link_bytes
    with torch.inference_mode(), residency.step([(SLOT, TokenRange(41, 42))]) as step:
        DECODER.forward(IDS[41:42], step.spans, step.turns)
    picked = (layout.num_layers - 2) * 30 * layout.row_bytes  # 20 heavy and 10 recent
    assert residency.num_link_bytes - before == picked
    assert step.num_bytes_read == 2 * 42 * layout.row_bytes + picked
    row = residency._rows[SLOT]
    kept = (layout.num_layers - 2) * layout.num_kv_heads * 29 * 8
    assert row.index.num_bytes == kept <= row.index.bytes_for(42)
    assert (residency.traits.name, residency.traits.is_exact) == ("h2o", False)
    row.release()
    assert row.num_bytes == KvBytes()


@needs_rows
def test_a_slot_begins_anew() -> None:
    residency, fresh = make(), make()
    push(residency, 60, ids=prompt(60, seed=3))
    run(residency, steps(60, 64))
    residency._rows[SLOT].release()
    for each in (residency, fresh):
        push(each, NUM_PROMPT)
    parts = steps(NUM_PROMPT, NUM_ALL)
    assert torch.equal(run(residency, parts), run(fresh, parts))
