"""Factory of speculators for benchmarks. In addition to Baton's own speculators, it creates speculators that use the
draft views of `quest` and `topk`. A draft view determines which keys draft steps attend to. These two draft views are
comparators: they serve only for comparison."""

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
"""Factories of the draft views that select keys, by the name of the speculator. A draft view determines which keys
draft steps attend to."""


def configured(name: str) -> SpeculationName:
    """Return the value that the field `speculation` of the engine's configuration must have to run the speculator
    `name`. The engine reserves memory according to this field. The field does not accept the names of comparators; for
    them, return the name of a similar speculator."""
    return "snapkv" if name in _VIEWS else cast(SpeculationName, name)


def make_speculation(name: str, model: ServedModel, slots: SlotTable, config: EngineConfig) -> Speculator | None:
    """Create the speculator with the given name, like `generate_workers.speculation.making.make_speculation`, but also
    accept the names of comparators (`quest` and `topk`). Return None if `name` means no speculation.

    In `config`, the field `speculation` must have the value that `configured(name)` returns. Raises the errors of
    `making.make_speculation`.
    """
    return making.make_speculation(model, slots, config, name=name, choosing=CHOOSING)
