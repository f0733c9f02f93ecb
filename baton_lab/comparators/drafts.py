"""Makes speculators for benchmarks: those of the product, and those that draft with the comparators' views."""

from collections.abc import Mapping
from typing import cast

from baton_lab.comparators.quest import QuestView
from baton_lab.comparators.topk import TopKeysView
from generate_workers.config import EngineConfig, SpeculationName
from generate_workers.engine.served_model import ServedModel
from generate_workers.slots.table import SlotTable
from generate_workers.speculation import making
from generate_workers.speculation.making import MakeChoosing
from generate_workers.speculation.speculator import Speculator

_VIEWS: Mapping[str, MakeChoosing] = {
    "quest": lambda decoder, residency, config: QuestView(residency, decoder.layout, config.draft_keys),
    "topk": lambda decoder, residency, config: TopKeysView(residency, config.draft_keys),
}
CHOOSING: Mapping[str, MakeChoosing] = {**making.CHOOSING, **_VIEWS}
"""Makers of the draft views that select keys, by the name of the speculation."""


def configured(name: str) -> SpeculationName:
    """Return the speculation name for the engine's configuration, so that its memory is sized for drafts of `name`."""
    return "snapkv" if name in _VIEWS else cast(SpeculationName, name)


def make_speculation(name: str, model: ServedModel, slots: SlotTable, config: EngineConfig) -> Speculator | None:
    """Make the speculation of that name, as `generate_workers.speculation.making.make_speculation` does. `config` has
    the speculation that `configured` returns for it. Raises what that raises."""
    return making.make_speculation(model, slots, config, name=name, choosing=CHOOSING)
