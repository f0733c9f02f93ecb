"""Steps of policies that attend to some of the keys, one at a time, watched and disturbed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.ids import SlotId
from baton.types import TokenRange
from generate_workers.residency.port import KvShape, Residency
from generate_workers.residency.rows import MakeMemory
from generate_workers.residency.steps import RowResidency
from modeling.forward.decoder import Decoder, LayerTurns
from modeling.forward.selection import Picks
from tests.support.engines.devices import PoisonedMemory
from tests.support.engines.generation import prefilled

Disturb = Callable[[int, Picks], None]
"""(layer, picks): called when they are chosen, before anybody attends to them."""


@dataclass
class Watched:
    """LayerTurns that note what a step picks, by layer."""

    turns: LayerTurns
    disturb: Disturb = lambda layer, picks: None
    found: dict[int, Picks | None] = field(default_factory=dict)
    queries: dict[int, Tensor] = field(default_factory=dict)

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        self.turns.begin(layer, hidden_TD)

    def picks(self, layer: int, q_TNH: Tensor) -> Picks | None:
        self.queries[layer] = q_TNH.clone()
        picks = self.found[layer] = self.turns.picks(layer, q_TNH)
        if picks is not None:
            self.disturb(layer, picks)
        return picks

    def end(self, layer: int) -> None:
        self.turns.end(layer)


@dataclass
class Bench:
    """A policy whose slots are filled by pushes, and run by hand."""

    decoder: Decoder
    residency: Residency
    lengths: dict[int, int] = field(default_factory=dict)
    room: int = 16
    """Tokens that a row may get."""

    @classmethod
    def of(
        cls,
        decoder: Decoder,
        make: Callable[[KvShape, MakeMemory], Residency],
        prompts: Sequence[Sequence[int]],
        room: int = 16,
    ) -> "Bench":
        """A slot for each prompt, with its KV, and room for some tokens more."""
        most = max(len(ids) for ids in prompts) + room
        shape = KvShape(decoder.layout, decoder.config.windows, len(prompts), most)
        made = cls(decoder, make(shape, PoisonedMemory), room=room)
        for slot, ids in enumerate(prompts):
            made.fill(slot, ids)
        return made

    def fill(self, slot: int, ids: Sequence[int]) -> None:
        """Pushes what a forward of its own made."""
        buffer, _ = prefilled(self.decoder, ids)
        row = self.residency.open(SlotId(slot), len(ids), len(ids) + self.room)
        for layer in range(self.decoder.layout.num_layers):
            row.write(layer, buffer.tokens, buffer.export(layer, buffer.tokens)).result()
        self.lengths[slot] = len(ids)

    @torch.inference_mode()
    def run(
        self, tokens: Mapping[int, Sequence[int]], disturb: Disturb = lambda layer, picks: None
    ) -> tuple[Tensor, Watched]:
        """One forward of some slots with their next tokens: the logits of each token, and what was picked."""
        rows = [
            (SlotId(slot), TokenRange(self.lengths[slot], self.lengths[slot] + len(ids)))
            for slot, ids in tokens.items()
        ]
        with self.residency.step(rows) as step:
            assert step.turns is not None
            watched = Watched(step.turns, disturb)
            hidden_TD = self.decoder.forward([each for ids in tokens.values() for each in ids], step.spans, watched)
        for slot, ids in tokens.items():
            self.lengths[slot] += len(ids)
        return self.decoder.logits(hidden_TD), watched

    def home(self, slot: int, layer: int) -> Tensor:
        """`[S, 2, G, H]`: all that a slot has of a layer at home."""
        assert isinstance(self.residency, RowResidency)
        kv, at = self.residency._rows[slot]._homes[layer]
        home_S2GH: Tensor = kv.memory.data_LS2GH[at]
        return home_S2GH

    def close(self) -> None:
        """Gives all back, and sees that it is."""
        assert isinstance(self.residency, RowResidency)
        for row in self.residency._rows:
            row.release()
            assert (row.num_bytes.home, row.num_bytes.device) == (0, 0)
        self.residency.close()


def lists(picks: Picks | None, row: int) -> list[list[int]]:
    """Each kv head's keys."""
    assert picks is not None
    counts_G = picks.num_BG[row].tolist()
    return [keys[:count] for keys, count in zip(picks.keys_BGK[row].tolist(), counts_G, strict=True)]
