"""Single steps of policies that attend to selected keys. Tests can inspect and disturb the steps. Also engines with
these policies."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from baton.modeling.forward.decoder import Decoder, LayerTurns
from baton.modeling.forward.selection import Picks, Selection
from baton.sampling_params import SamplingParams
from baton.types import SlotId, TokenRange
from baton_lab.comparators.oracle import OracleResidency
from baton_lab.comparators.window import WindowResidency
from generate_workers.residency.port import KvShape, Residency
from generate_workers.residency.row_parts import MakeMemory
from generate_workers.residency.steps import RowResidency
from generate_workers.slots.kv_memory import MemoryLimits
from tests.support.engines.devices import PoisonedMemory
from tests.support.engines.generation import harness, prefilled, prompt
from tests.support.engines.infinigen import LENGTHS, PARAMS
from tests.support.engines.slot_tables import UNLIMITED, Policy

MakePolicy = Callable[[KvShape, MakeMemory], Residency]
Disturb = Callable[[int, Picks], None]
"""Callback (layer, selected keys). It is called after keys are selected and before they are used."""
PROMPTS = [prompt(length, seed) for seed, length in enumerate((60, 25, 90))]
TOKENS = prompt(200, seed=9)
"""Next tokens of all sequences."""


@dataclass
class Watched:
    """LayerTurns that record the selected keys and the queries of a step, by layer."""

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
    """Policy whose slots are filled by pushes, and whose steps the test runs."""

    decoder: Decoder
    residency: Residency
    lengths: dict[int, int] = field(default_factory=dict)
    room: int = 16
    """Number of tokens that a sequence can gain."""
    most: int = 0
    """Capacity of a slot in tokens."""

    @classmethod
    def of(
        cls,
        decoder: Decoder,
        make: MakePolicy,
        prompts: Sequence[Sequence[int]],
        room: int = 16,
    ) -> "Bench":
        """Create a bench with one slot per prompt. Each slot holds the prompt's KV and has capacity for `room` more
        tokens."""
        most = max(len(ids) for ids in prompts) + room
        shape = KvShape(decoder.layout, decoder.config.windows, len(prompts), most)
        made = cls(decoder, make(shape, PoisonedMemory), room=room, most=most)
        for slot, ids in enumerate(prompts):
            made.fill(slot, ids)
        return made

    def fill(self, slot: int, ids: Sequence[int]) -> None:
        """Compute KV in a separate forward pass, and push it."""
        buffer, _ = prefilled(self.decoder, ids)
        row = self.residency.open(SlotId(slot), len(ids), len(ids) + self.room)
        for layer in range(self.decoder.layout.num_layers):
            row.write(layer, buffer.tokens, buffer.export(layer, buffer.tokens)).result()
        self.lengths[slot] = len(ids)

    @torch.inference_mode()
    def run(
        self, tokens: Mapping[int, Sequence[int]], disturb: Disturb = lambda layer, picks: None
    ) -> tuple[Tensor, Watched]:
        """Run one forward pass of some slots with their next tokens. Return the logits of each token, and the recorded
        step."""
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

    def turns(self, num_steps: int) -> Iterator[Tensor]:
        """Yield the logits of steps with one token per sequence. In each step, different sequences are absent."""
        for step in range(num_steps):
            slots = [slot for slot in self.lengths if (step + slot) % 4]
            yield self.run(dict.fromkeys(slots, TOKENS[step : step + 1]))[0]

    def copy(self, source: int, target: int) -> None:
        """Replace the sequence in slot `target` by a copy of the sequence in slot `source`."""
        assert isinstance(self.residency, RowResidency)
        length = self.lengths[target] = self.lengths[source]
        self.residency._rows[target].release()
        self.residency.open(SlotId(target), length, self.most)
        self.residency.copy(SlotId(source), SlotId(target), length)

    def home(self, slot: int, layer: int) -> Tensor:
        """Return the KV `[S, 2, G, H]` of a slot's layer in host memory."""
        assert isinstance(self.residency, RowResidency)
        kv, at = self.residency._rows[slot]._homes[layer]
        home_S2GH: Tensor = kv.memory.data_LS2GH[at]
        return home_S2GH

    def close(self) -> None:
        """Release all sequences, and check that no memory is held."""
        assert isinstance(self.residency, RowResidency)
        for row in self.residency._rows:
            row.release()
            assert (row.num_bytes.home, row.num_bytes.device) == (0, 0)
        self.residency.close()


def window(selection: Selection) -> MakePolicy:
    """Return a function that creates the comparison policy that attends to the first and the latest keys."""
    return lambda shape, make: WindowResidency(shape, make, selection)


def oracle(selection: Selection) -> MakePolicy:
    """Return a function that creates the comparison policy that attends to the keys with the largest exact scores."""
    return lambda shape, make: OracleResidency(shape, make, selection)


def lists(picks: Picks | None, row: int) -> list[list[int]]:
    """Return the selected keys of one sequence, by KV head."""
    assert picks is not None
    counts_G = picks.num_BG[row].tolist()
    return [keys[:count] for keys, count in zip(picks.keys_BGK[row].tolist(), counts_G, strict=True)]


def answers(decoder: Decoder, policy: Policy, max_tokens: int, limits: MemoryLimits = UNLIMITED) -> list[list[int]]:
    """Return the tokens of sequences that join one by one (prefilled locally or pushed), and of a request with two
    choices."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    with harness(decoder=decoder, policy=policy, num_slots=6, limits=limits, growth_tokens=1) as made:
        ref = made.reserve(33, 80).ref
        made.push_and_commit(ref, prompt(33), params)
        streams = [made.submit(prompt(33), params, ref=ref)[1]]
        for length in (1, 40, 50, 70):
            streams.append(made.submit(prompt(length), params)[1])
            made.engine.step()
        choices = made.submit(prompt(15), replace(params, n=2, temperature=1.0, seed=3))[1]
        made.run()
        assert limits == UNLIMITED or made.engine.status().num_preemptions > 0
        return [stream.token_ids for stream in (*streams, choices.choice(0), choices.choice(1))]


def streamed(decoder: Decoder, policy: Policy) -> dict[int, list[int]]:
    """Return the tokens of sequences by the length of their prompts. The sequence of length 33 is pushed; the others
    are prefilled locally."""
    with harness(decoder=decoder, policy=policy, num_slots=8) as made:
        streams = {length: made.submit(prompt(length), PARAMS)[1] for length in LENGTHS}
        ref = made.reserve(33, 60).ref
        made.push_and_commit(ref, prompt(33), PARAMS)
        streams[33] = made.submit(prompt(33), PARAMS, ref=ref)[1]
        made.run()
    return {length: stream.token_ids for length, stream in streams.items()}
