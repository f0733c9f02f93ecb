"""Draft views that choose keys, for tests: their names, rows with KV to draft for, and what a draft step attends to."""

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
"""All whose drafts choose keys, those of the product and the comparators."""
DECODER = random_decoder(num_layers=4)
"""A model with layers that may choose, behind the two that stay whole."""
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@contextmanager
def decoding(
    prompts: Sequence[Sequence[int]], *, decoder: Decoder = DECODER, selection: Selection = SOME, num_slots: int = 8
) -> Iterator[tuple[Harness, list[Row]]]:
    """An engine whose rows have their first token, and the KV of all tokens before, with partial keys beside."""
    policy = partial(IndexedResidency, prepared=prepared(selection, decoder=decoder))
    with harness(decoder=decoder, policy=policy, num_slots=num_slots, max_prefill_tokens_per_step=512) as made:
        for each in prompts:
            made.submit(each, GREEDY)
        made.engine.step()
        rows = list(made.engine._running.rows.values())
        assert all(row.num_known == row.num_cached + 1 for row in rows)
        yield made, rows
        made.run()


def make_view(name: str, made: Harness, num_keys: int) -> DraftView:
    """The view of that name over an engine's rows."""
    return CHOOSING[name](made.decoder, residency_of(made), EngineConfig(draft_keys=num_keys))


def residency_of(made: Harness) -> DeviceResidency:
    """Where an engine's rows lie."""
    residency = made.slots.memory.residency
    assert isinstance(residency, DeviceResidency)
    return residency


@dataclass
class Watching:
    """A DraftView that notes what the steps of another attend to. With `poison`, whatever a layer does not attend to is
    NaN while its attention runs."""

    view: DraftView
    residency: DeviceResidency
    poison: bool = False
    found: list[dict[int, Picks | None]] = field(default_factory=list)
    """What each step's rows attend to, by layer."""

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
    """LayerTurns around those, or the picks, of a step."""

    step: DraftStep
    rows: StepRows
    residency: DeviceResidency
    poison: bool
    found: dict[int, Picks | None] = field(default_factory=dict)
    _hidden: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    """Poisoned KV, where in it, and what was there."""

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
    """The keys of each row and kv head."""
    num_BG = picks.num_BG.tolist()
    return [
        [keys[:num] for keys, num in zip(heads, nums, strict=True)]
        for heads, nums in zip(picks.keys_BGK.tolist(), num_BG, strict=True)
    ]
