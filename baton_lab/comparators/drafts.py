"""Factory of speculators for benchmarks: Baton's own speculators, and those that draft with the comparators' draft
views."""

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
"""Functions that create the draft views that select keys, by the name of the speculation."""


def configured(name: str) -> SpeculationName:
    """Return the speculation name to put into the engine's configuration. With it, the engine reserves enough memory
    for drafts of the speculation `name`."""
    return "snapkv" if name in _VIEWS else cast(SpeculationName, name)


def make_speculation(name: str, model: ServedModel, slots: SlotTable, config: EngineConfig) -> Speculator | None:
    """Create the speculator with the given name, like `generate_workers.speculation.making.make_speculation`, but also
    accept the names of comparators. Return None if `name` means no speculation.

    `config` must contain the speculation that `configured(name)` returns. Raises the errors of
    `making.make_speculation`.
    """
    return making.make_speculation(model, slots, config, name=name, choosing=CHOOSING)
