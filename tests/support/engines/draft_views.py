"""Draft views that select keys, for tests: their names, engines with sequences to draft for, and a recorder of the keys
to which draft steps attend."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.selection import Picks, Selection
from baton.sampling_params import SamplingParams
from baton_lab.comparators.drafts import CHOOSING
from generate_workers.config import EngineConfig
from generate_workers.engine.rows import Row
from generate_workers.residency.device import DeviceResidency
from generate_workers.residency.port import StepRows
from generate_workers.residency.sparse.draft_index import IndexedResidency
from generate_workers.speculation.self_drafts import DraftStep, DraftView
from tests.support.engines.generation import Harness, harness
from tests.support.engines.infinigen import SOME, prepared
from tests.support.models.tiny_models import random_decoder

VIEWS = ("snapkv", "infinigen", "quest", "topk")
"""Names of all draft views that select keys, both the product's and those of the comparison."""
DECODER = random_decoder(num_layers=4)
"""Model whose first two layers attend to all keys. Its other layers can select keys."""
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@contextmanager
def decoding(
    prompts: Sequence[Sequence[int]], *, decoder: Decoder = DECODER, selection: Selection = SOME, num_slots: int = 8
) -> Iterator[tuple[Harness, list[Row]]]:
    """Run an engine whose sequences have their first output token. Its KV, with partial keys, holds all tokens before
    that token."""
    policy = partial(IndexedResidency, prepared=prepared(selection, decoder=decoder))
    with harness(decoder=decoder, policy=policy, num_slots=num_slots, max_batched_tokens=512) as made:
        for each in prompts:
            made.submit(each, GREEDY)
        made.engine.step()
        rows = list(made.engine._running.rows.values())
        assert all(row.num_known == row.num_cached + 1 for row in rows)
        yield made, rows
        made.run()


def make_view(name: str, made: Harness, num_keys: int) -> DraftView:
    """Return the draft view called `name` over an engine's sequences."""
    return CHOOSING[name](made.decoder, residency_of(made), EngineConfig(draft_keys=num_keys))


def residency_of(made: Harness) -> DeviceResidency:
    """Return the residency (memory policy) of an engine's KV."""
    residency = made.slots.memory.residency
    assert isinstance(residency, DeviceResidency)
    return residency


@dataclass
class Watching:
    """DraftView that records the keys to which the steps of another view attend. With `poison`, KV to which a layer
    does not attend is NaN during its attention."""

    view: DraftView
    residency: DeviceResidency
    poison: bool = False
    found: list[dict[int, Picks | None]] = field(default_factory=list)
    """Selected keys of each step, by layer."""

    def begin(self, rows: Sequence[Row], num_keys: Sequence[int] = ()) -> None:
        self.view.begin(rows, num_keys)

    @contextmanager
    def step(self, rows: StepRows) -> Iterator[DraftStep]:
        with self.view.step(rows) as step:
            watch = _Watch(step, rows, self.residency, self.poison)
            self.found.append(watch.found)
            yield DraftStep(step.spans, watch)

    def forget(self, row: Row) -> None:
        self.view.forget(row)


@dataclass
class _Watch:
    """LayerTurns that wrap the LayerTurns, or the prepared key selection, of a step."""

    step: DraftStep
    rows: StepRows
    residency: DeviceResidency
    poison: bool
    found: dict[int, Picks | None] = field(default_factory=dict)
    _hidden: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    """KV tensors that were overwritten with NaN, the indices that were overwritten, and the original values."""

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        if self.step.turns is not None:
            self.step.turns.begin(layer, hidden_TD)

    def picks(self, layer: int, q_TNH: Tensor) -> Picks | None:
        if self.step.picks is not None:
            picks: Picks | None = self.step.picks.of_layer(layer)
        else:
            assert self.step.turns is not None
            picks = self.step.turns.picks(layer, q_TNH)
        self.found[layer] = picks
        if self.poison and picks is not None:
            self._hide(layer, picks)
        return picks

    def end(self, layer: int) -> None:
        for kv_S2GH, is_hidden_SG, kept in self._hidden:
            kv_S2GH.transpose(1, 2)[is_hidden_SG] = kept
        self._hidden.clear()
        if self.step.turns is not None:
            self.step.turns.end(layer)

    def _hide(self, layer: int, picks: Picks) -> None:
        for place, (slot, tokens) in enumerate(self.rows):
            kv_S2GH = self.residency.kv(slot, layer, replace(tokens, start=0))
            is_hidden_SG = torch.ones(tokens.end, kv_S2GH.shape[2], dtype=torch.bool)
            for head, keys in enumerate(lists_of(picks)[place]):
                is_hidden_SG[keys, head] = False
            self._hidden.append((kv_S2GH, is_hidden_SG, kv_S2GH.transpose(1, 2)[is_hidden_SG].clone()))
            kv_S2GH.transpose(1, 2)[is_hidden_SG] = torch.nan


def lists_of(picks: Picks) -> list[list[list[int]]]:
    """Return the selected keys of each sequence and KV head."""
    num_BG = picks.num_BG.tolist()
    return [
        [keys[:num] for keys, num in zip(heads, nums, strict=True)]
        for heads, nums in zip(picks.keys_BGK.tolist(), num_BG, strict=True)
    ]
