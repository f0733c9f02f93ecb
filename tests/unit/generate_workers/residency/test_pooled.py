"""InfiniGen on a pool: places hold what lists of tokens keep; where nobody has to go, all is the same as without."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.errors import ConfigError
from baton.modeling.device.cpu import CpuDevice
from baton.modeling.forward.decoder import LayerTurns
from baton.modeling.forward.selection import Picks, Selection
from baton.modeling.kv.buffers import KvBuffer, KvPlace, KvRows
from baton.modeling.kv.row_memory import PagedMemory
from baton.modeling.sparse.selection_file import save_prepared
from baton.types import SlotId, TokenRange
from generate_workers.config import EngineConfig
from generate_workers.engine.memory_limits import make_memory
from generate_workers.residency.policies import SelectionSource, make_residency
from generate_workers.residency.port import KvBytes, KvShape, StepKv
from generate_workers.residency.sparse.infinigen_pooled import PooledResidency, PooledStep
from generate_workers.residency.sparse.pool import Eviction, PoolLimit, PoolSize
from tests.support.engines.devices import PoisonedMemory
from tests.support.engines.generation import prefilled, prompt
from tests.support.engines.infinigen import (
    DECODER,
    LAYERS,
    LAYOUT,
    LENGTHS,
    SOME,
    infinigen,
    lookaheads,
    pooled,
    prepared,
    random_basis,
)
from tests.support.engines.pools import Trace, row_of
from tests.support.engines.selective import Bench, lists, streamed
from tests.support.engines.slot_tables import whole_pages

NUM_HEADS = LAYOUT.num_kv_heads
evictions = pytest.mark.parametrize("eviction", list(Eviction))


# The same as without a pool.


@lookaheads
@pytest.mark.parametrize("num_tokens", [61 + 16, 61 + 12, 500])
def test_a_pool_that_holds_the_whole_row_changes_no_bit(lookahead: int, num_tokens: int) -> None:
    """The pool holds the claim's capacity, or only the tokens so far."""
    prompts = [prompt(40), prompt(7), prompt(61)]
    without = Bench.of(DECODER, infinigen(prepared(lookahead=lookahead)), prompts)
    bench = Bench.of(DECODER, pooled(num_tokens, lookahead=lookahead), prompts)
    for number in range(12):
        fed = {0: [number], 1: [3], 2: [9]} if number != 5 else {0: [1, 2], 1: [4, 5, 6], 2: [7]}
        expected, watched = without.run(fed)
        found, seen = bench.run(fed)
        assert torch.equal(found, expected)
        for layer in LAYERS:
            for row in range(sum(len(ids) == 1 for ids in fed.values())):
                assert lists(seen.found[layer], row) == lists(watched.found[layer], row)
    assert bench.residency.num_link_bytes == without.residency.num_link_bytes
    without.close()
    bench.close()


@lookaheads
def test_streams_are_the_same_where_nobody_has_to_go(lookahead: int) -> None:
    without = streamed(DECODER, infinigen(prepared(lookahead=lookahead)))
    assert streamed(DECODER, pooled(72, lookahead=lookahead)) == without


# What is kept.


def fill_in_pieces(bench: Bench, slot: int, ids: Sequence[int], order: Sequence[int], room: int) -> Tensor:
    """Pushes a prompt in seven pieces; returns the KV of the layers that choose."""
    buffer, _ = prefilled(DECODER, ids)
    row = bench.residency.open(SlotId(slot), len(ids), len(ids) + room)
    pieces = TokenRange(0, len(ids)).split(-(-len(ids) // 7))
    for layer in range(LAYOUT.num_layers):
        for number in order:
            if number < len(pieces):
                row.write(layer, pieces[number], buffer.export(layer, pieces[number])).result()
    bench.lengths[slot] = len(ids)
    return buffer.data[LAYERS.start :]


def closeness(q_NR: Tensor, k_PGR: Tensor) -> Tensor:
    """How close each key comes to the best one, for the query head for which it comes closest: `[G, P]`."""
    num_kv_heads, num_columns = k_PGR.shape[1:]
    scores_GJP = q_NR.double().view(num_kv_heads, -1, num_columns) @ k_PGR.double().permute(1, 2, 0)
    most_GJ1: Tensor | float = scores_GJP.amax(2, keepdim=True) if len(k_PGR) else 0.0
    return (scores_GJP - most_GJ1).amax(1)


def note_queries(turns: LayerTurns, queries: dict[int, Tensor]) -> None:
    """Note by layer the queries that choose: true ones, or guessed ones."""
    assert isinstance(turns, PooledStep)
    select = turns._select

    def noting(layer: int, q_BNH: Tensor, closeness_BGS: Tensor | None = None) -> Picks:
        queries[layer] = q_BNH.clone()
        return select(layer, q_BNH, closeness_BGS)

    turns._select = noting  # type: ignore[method-assign]


def turns_of(step: StepKv) -> LayerTurns:
    assert step.turns is not None
    return step.turns


def traced_run(bench: Bench, traces: Sequence[Trace], fed: dict[int, list[int]]) -> None:
    """One forward, of which the lists hear."""
    rows = [
        (SlotId(slot), TokenRange(bench.lengths[slot], bench.lengths[slot] + len(ids))) for slot, ids in fed.items()
    ]
    single = [slot for slot, ids in fed.items() if len(ids) == 1]
    queries: dict[int, Tensor] = {}
    new: dict[int, list[Tensor]] = {slot: [] for slot in fed}
    with torch.inference_mode(), bench.residency.step(rows) as step:
        turns = turns_of(step)
        note_queries(turns, queries)

        class Noting:
            def begin(self, layer: int, hidden_TD: Tensor) -> None:
                turns.begin(layer, hidden_TD)

            def picks(self, layer: int, q_TNH: Tensor) -> Picks | None:
                picks = turns.picks(layer, q_TNH)
                for row, slot in enumerate(single if picks is not None else []):
                    trace = traces[slot]
                    num_kept = min(len(trace.truth), trace.limit.num_places)
                    before = row_of(bench, slot).kv(layer, TokenRange(0, num_kept))
                    assert picks is not None
                    q_NR = random_basis(LAYOUT).queries(layer, queries[layer])[row]
                    closeness_GP = closeness(q_NR, row_of(bench, slot).partial.read(layer, num_kept))
                    trace.picked(layer - LAYERS.start, picks, row, before, closeness_GP)
                return picks

            def end(self, layer: int) -> None:
                if layer in LAYERS:
                    for (slot, _), span in zip(rows, step.spans, strict=True):
                        new[slot].append(span.own(layer).clone())
                turns.end(layer)

        hidden_TD = DECODER.forward([each for ids in fed.values() for each in ids], step.spans, Noting())
    assert torch.isfinite(DECODER.logits(hidden_TD)).all()
    for slot, ids in fed.items():
        bench.lengths[slot] += len(ids)
        traces[slot].came(torch.stack(new[slot]))


@evictions
@pytest.mark.parametrize(
    ("selection", "lookahead"),
    [
        *((SOME, 1), (Selection(3.0, 0.3, 0, 1), 0)),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((SOME, 0), (Selection(3.0, 0.1, 4, 2), 1))),
    ],
)
def test_places_hold_what_lists_of_tokens_keep(eviction: Eviction, selection: Selection, lookahead: int) -> None:
    """Rows that are longer than their pools from the start, that come to be, and that never do; now and then several
    tokens come at once, as they do where a prompt goes on."""
    limit = PoolLimit(24, eviction, selection.num_first, selection.num_last)
    prompts = [prompt(40), prompt(20), prompt(61), prompt(24), prompt(3)]
    shape = KvShape(LAYOUT, DECODER.config.windows, len(prompts), 140)
    bench = Bench(DECODER, pooled(24, eviction, selection, lookahead)(shape, PoisonedMemory))
    traces = [Trace(bench, slot, limit) for slot in range(len(prompts))]
    generator = torch.Generator().manual_seed(3)
    for slot, ids in enumerate(prompts):
        order = torch.randperm(7, generator=generator).tolist()
        traces[slot].came(fill_in_pieces(bench, slot, ids, order, 16 if slot == 4 else 79))
    for number in range(36):
        slots = [slot for slot in range(4) if torch.rand(1, generator=generator) < 0.8] + [4] * (number < 16)
        fed = {slot: [int(torch.randint(0, 90, (1,), generator=generator))] for slot in slots}
        if number in (0, 11, 12):
            fed[1], fed[2] = [5, 6, 7], [8] * 9
        traced_run(bench, traces, fed)
        if number % 5 == 0:
            for slot in fed:
                if len(fed[slot]) == 1:
                    traces[slot].check(random_basis(LAYOUT))
    for trace in traces:
        trace.check(random_basis(LAYOUT))
    assert sum(len(trace.truth) for trace in traces[:4]) > 4 * 24 + 100
    bench.close()


# Prompts.


@dataclass(frozen=True)
class WindowSpan:
    """Tokens that see all in the whole layers, and in the others the first tokens, the latest, and each other."""

    buffer: KvBuffer
    tokens: TokenRange
    limit: PoolLimit

    def own(self, layer: int) -> Tensor:
        return self.buffer.span(layer, self.tokens)

    def segments(self, layer: int) -> Iterator[KvRows]:
        start, (first, places) = self.tokens.start, (self.limit.num_first, self.limit.num_places)
        if layer not in LAYERS or start <= places:
            yield self.buffer.rows(layer, TokenRange(0, self.tokens.end))
            return
        yield self.buffer.rows(layer, TokenRange(0, first))
        yield self.buffer.rows(layer, TokenRange(start - (places - first), self.tokens.end))

    def place(self) -> KvPlace | None:
        return None


@pytest.mark.parametrize("num_present", [0, 40])
def test_a_long_prompt_that_is_prefilled_here_sees_what_is_kept(num_present: int) -> None:
    """The same for the tokens it begins with, of which more than the end is kept while the prompt is incomplete."""
    limit, ids, chunk = PoolLimit(30, Eviction.COUNTER, SOME.num_first, SOME.num_last), prompt(90), 13
    bench = Bench.of(DECODER, pooled(limit.num_places), [prompt(90)])
    bench.close()
    row = bench.residency.open(SlotId(0), len(ids), len(ids) + 16)
    with torch.inference_mode(False):
        buffer = KvBuffer(LAYOUT, TokenRange(0, len(ids)))
    if num_present:
        present, _ = prefilled(DECODER, ids[:num_present])
        for layer in range(LAYOUT.num_layers):
            buffer.span(layer, present.tokens).copy_(present.span(layer, present.tokens))
            row.write(layer, present.tokens, present.export(layer, present.tokens)).result()
    bench.lengths[0] = num_present
    for tokens in (TokenRange(at, min(at + chunk, len(ids))) for at in range(num_present, len(ids), chunk)):
        fed = list(ids[tokens.start : tokens.end])
        with torch.inference_mode():
            expected = DECODER.logits(DECODER.forward(fed, [WindowSpan(buffer, tokens, limit)]))
        found, _ = bench.run({0: fed})
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    bench.run({0: [5]})
    assert row.num_bytes == bench.residency.bytes_for(91)
    bench.close()


# What a row is to others.


@lookaheads
@evictions
def test_what_a_row_does_depends_on_no_other(lookahead: int, eviction: Eviction) -> None:
    prompts = [prompt(length) for length in LENGTHS]
    together = Bench.of(DECODER, pooled(20, eviction, lookahead=lookahead), prompts)
    single = [Bench.of(DECODER, pooled(20, eviction, lookahead=lookahead), [ids]) for ids in prompts]
    for number in range(16):
        fed = {slot: [7 * slot + number] for slot in range(4) if (slot + number) % 3}
        logits_BV, watched = together.run(fed)
        for row, slot in enumerate(fed):
            alone_V, seen = single[slot].run({0: fed[slot]})
            assert all(lists(seen.found[layer], 0) == lists(watched.found[layer], row) for layer in LAYERS)
            torch.testing.assert_close(alone_V[0], logits_BV[row], atol=1e-4, rtol=1e-5)
    for bench in (together, *single):
        bench.close()


@evictions
def test_a_copy_goes_on_as_its_source(eviction: Eviction) -> None:
    bench = Bench.of(DECODER, pooled(20, eviction), [prompt(40), prompt(3)])
    for number in range(3):
        bench.run({0: [number]})
    bench.copy(0, 1)
    for number in range(12):
        logits_BV, watched = bench.run({0: [number], 1: [number]})
        assert torch.equal(logits_BV[0], logits_BV[1])
        assert all(lists(watched.found[layer], 0) == lists(watched.found[layer], 1) for layer in LAYERS)
    assert row_of(bench, 0).num_bytes == row_of(bench, 1).num_bytes
    bench.close()


# What a row costs.


def test_memory_is_never_more_than_the_limit_s() -> None:
    bench = Bench.of(DECODER, pooled(24), [prompt(61)])
    row = row_of(bench, 0)
    places = 25
    whole, kept = 2 * whole_pages(77 * LAYOUT.row_bytes), len(LAYERS) * whole_pages(places * LAYOUT.row_bytes)
    orders = whole_pages(len(LAYERS) * NUM_HEADS * places * 4)
    partial = len(LAYERS) * whole_pages(2 * 16 * NUM_HEADS * 6 * 2)
    assert bench.residency.bytes_for(77) == KvBytes(whole + kept + orders, whole + partial)
    for number in range(16):
        bench.run({0: [number]})
        most = bench.residency.bytes_for(bench.lengths[0])
        assert row.num_bytes.home <= most.home
        assert row.num_bytes.device <= most.device
    assert row.num_bytes == bench.residency.bytes_for(77)
    assert row.others.memory.data_LS2GH.shape[1] == places
    bench.close()


def test_what_may_have_been_evicted_cannot_be_had() -> None:
    bench = Bench.of(DECODER, pooled(70), [prompt(40), prompt(61)])
    kept, _ = prefilled(DECODER, prompt(40))
    for layer in range(LAYOUT.num_layers):
        assert row_of(bench, 0).export(layer, TokenRange(3, 40)) == kept.export(layer, TokenRange(3, 40))
    assert row_of(bench, 1).export(1, TokenRange(0, 61)).nbytes == 61 * LAYOUT.row_bytes
    with pytest.raises(AssertionError, match="what a pool has evicted cannot be read"):
        row_of(bench, 1).export(2, TokenRange(0, 61))
    bench.close()


# As configured.


def test_a_pool_that_is_too_small_or_means_nothing_is_refused() -> None:
    shape = KvShape(LAYOUT, DECODER.config.windows, 2, 64)
    with pytest.raises(ConfigError, match="pool_tokens = 4 has no room for the 2 first and the 3 latest"):
        pooled(4)(shape, PagedMemory)
    with pytest.raises(ConfigError, match="residency = 'host' keeps all KV: leave pool_tokens at 0"):
        make_residency("host", shape, CpuDevice(), SelectionSource(DECODER, None, PoolSize(20)))
    with pytest.raises(ConfigError, match="pool_tokens = 20 means nothing to residency host: use 0, or infinigen"):
        EngineConfig(2, 64, residency="host", pool_tokens=20)
    with pytest.raises(ConfigError, match="pool_tokens = -1 is wrong: input should be greater than or equal to 0"):
        EngineConfig(pool_tokens=-1)
    none: Any = "none"
    with pytest.raises(
        ConfigError, match="pool_eviction = 'none' is wrong: input should be 'counter', 'lru' or 'fifo'"
    ):
        EngineConfig(2, 64, residency="infinigen", pool_tokens=20, pool_eviction=none)


def test_a_group_is_made_with_the_pool_that_was_configured(tmp_path: Path) -> None:
    save_prepared(prepared(), tmp_path / "found.safetensors")
    config = EngineConfig(2, 64, residency="infinigen", selection_file=str(tmp_path / "found.safetensors"))
    limited = make_memory(DECODER, replace(config, pool_tokens=20, pool_eviction="fifo")).residency
    assert isinstance(limited, PooledResidency)
    assert (limited.traits.name, limited.traits.is_exact) == ("infinigen", False)
    for pool_tokens in (0, 64):
        whole = make_memory(DECODER, replace(config, pool_tokens=pool_tokens)).residency
        assert not isinstance(whole, PooledResidency)
        assert whole.bytes_for(64).home > limited.bytes_for(64).home
