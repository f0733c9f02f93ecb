"""Residency `h2o`: attends to the keys with most attention so far, and to the latest (Zhang et al., 2023).

A Residency for `engine.step_runner`, to compare InfiniGen with. A key that H2O drops is never used again, even if a
later query would need it. Layers 0 and 1 are whole, as in InfiniGen's comparisons.

Faithful to the paper: sums are over all queries. The queries of a prompt that is prefilled here are projected once more
from each layer's input. A prompt that was pushed, or came from a prefix store, is run again for its queries, which
costs a prefill and needs only its KV (`pushed_prompts`). A prompt attends to itself whole, and is cut down to the
budget at its end. A step attends to the budget's keys, its own among them. Then the kept key with the least sum is
dropped, but never one of the latest. A step's weights are those over the kept keys: dropped keys get none.

Different from the paper: here a dropped key stays in host memory until its sequence ends, because it shares its pages
with other kv heads' keys. It is not read, and a device with memory of its own does not hold it (`fetched_h2o`). A long
span after the prompt, if there were one, would attend to all keys.

B rows of one new token, T tokens of all rows, N heads, G kv heads, H head dim, K keys that are kept.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from baton.errors import ModelError
from baton.modeling.forward.decoder import Decoder, Step
from baton.modeling.forward.selection import Picks
from baton.modeling.sparse.bases import NUM_WHOLE_LAYERS
from baton.types import KvLayout, SlotId, TokenRange
from baton_lab.comparators.heavy_hitters import HeavyBudget, HeavyHitters
from baton_lab.comparators.pushed_prompts import PushedPrompts
from baton_lab.comparators.traits import H2O
from generate_workers.residency.port import KvShape, RowError
from generate_workers.residency.rows import MakeMemory, StoredRow
from generate_workers.residency.sparse.selective import SelectiveRow, SelectiveStep
from generate_workers.residency.steps import RowResidency


class HitterIndex:
    """A Part of a row: the heavy hitters of each layer that chooses."""

    def __init__(
        self,
        layout: KvLayout,
        budget: HeavyBudget,
        make: Callable[[int], HeavyHitters] = HeavyHitters,
        key_bytes: int = 8,
    ) -> None:
        """`make`: makes the heavy hitters of one layer, which take `key_bytes` a key and kv head."""
        self.hitters: dict[int, HeavyHitters] = {}
        """Heavy hitters by layer, while the slot is claimed."""
        self.num_weighed = 0
        """Number of tokens, from the first, whose queries have weighed their keys."""
        self.num_prompt = 0
        """Tokens of the prompt."""
        self._budget, self._make, self._key_bytes = budget, make, key_bytes
        self._num_kv_heads = layout.num_kv_heads
        self._layers = range(NUM_WHOLE_LAYERS, layout.num_layers)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the data about the kept keys."""
        return sum(each.num_bytes for each in self.hitters.values())

    def bytes_for(self, num_tokens: int) -> int:
        """Return the bytes of the data about all tokens, which are kept while the prompt is incomplete."""
        return len(self._layers) * self._num_kv_heads * num_tokens * self._key_bytes

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin a claim for a prompt of `num_tokens` tokens."""
        self.num_prompt = num_tokens
        self.hitters = {layer: self._make(self._num_kv_heads) for layer in self._layers}

    def weigh(self, layer: int, q_TNH: Tensor, k_SGH: Tensor) -> Tensor:
        """Let the queries of the last T tokens weigh all kept keys. Once the prompt is complete, drops the keys that
        the next step may not keep. Returns the positions that were weighed, `[G, K]`."""
        positions_GK = self.hitters[layer].take(q_TNH, k_SGH)
        if len(k_SGH) >= self.num_prompt:
            self.drop(layer)
        return positions_GK

    def drop(self, layer: int) -> None:
        """Drop the keys that the next step may not keep, once the prompt is complete."""
        num_heavy, num_recent = self._budget.of(self.num_prompt)
        self.hitters[layer].drop(num_heavy, num_recent - 1)  # the next token is one of the latest

    def copy_from(self, other: "HitterIndex", num_tokens: int) -> None:
        """Copy another row's heavy hitters, which must be of `num_tokens` tokens."""
        self.num_weighed, self.num_prompt = other.num_weighed, other.num_prompt
        for layer, hitters in self.hitters.items():
            hitters.copy_from(other.hitters[layer])

    def release(self) -> None:
        """End the claim, if there is one."""
        self.num_weighed = 0
        self.hitters = {}


class WeighedRow(StoredRow):
    """A StoredRow whose keys are weighed by queries."""

    index: HitterIndex
    """Heavy hitters of each layer that chooses."""

    def read(self, layer: int, tokens: TokenRange) -> Tensor:
        """Return KV of `tokens`, which were written, where it can be computed with; valid until the next call."""
        return self.kv(layer, tokens)

    def weigh(self, layer: int, q_TNH: Tensor, tokens: TokenRange) -> Tensor:
        """Let the queries of `tokens`, whose keys are in place, weigh all kept keys, as HitterIndex does. Return the
        keys that were weighed, `[G, K]`, by the numbers that picks have."""
        return self.index.weigh(layer, q_TNH, self.read(layer, TokenRange(0, tokens.end))[:, 0])


W = TypeVar("W", bound=WeighedRow)


class H2oRow(SelectiveRow, WeighedRow):
    """A WeighedRow that keeps all KV."""

    def __init__(self, shape: KvShape, make_memory: MakeMemory, budget: HeavyBudget) -> None:
        """Raise what is in OUT_OF_MEMORY when the slot's address space cannot be allocated."""
        self.index = HitterIndex(shape.layout, budget)
        super().__init__(shape, make_memory, self.index)


class H2oStep(SelectiveStep[W]):
    """A step whose rows of one new token weigh keys as they choose; longer spans' queries are projected once more."""

    def __init__(self, rows: Sequence[tuple[W, TokenRange]], decoder: Decoder) -> None:
        super().__init__(decoder.layout, rows)
        self._decoder = decoder
        ranges = [torch.arange(span.tokens.start, span.tokens.end) for *_, span in self.longer]
        self._steps = [Step(decoder.weights.positions.lookup(each), spans=()) for each in ranges]
        """Steps that project the longer spans' queries."""
        self._queries: list[Tensor] = []
        """Queries of the longer spans in the layer that runs; empty in a layer that is whole."""

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Project the longer spans' queries. Their keys are in place at the layer's end."""
        self._queries = [
            self._decoder.project(layer, hidden_TD[at : at + len(span.tokens)], step)
            for (at, _, span), step in zip(self.longer, self._steps, strict=True)
            if layer >= NUM_WHOLE_LAYERS
        ]

    def choose(self, layer: int, q_BNH: Tensor) -> Picks:
        """Return the keys that each row has kept, and its new token."""
        lists = [
            row.weigh(layer, q_NH.unsqueeze(0), tokens)
            for (row, tokens), q_NH in zip(self.choosing, q_BNH, strict=True)
        ]
        num_B = torch.tensor([each.shape[1] for each in lists], dtype=torch.int32)
        num_BG = num_B.unsqueeze(1).repeat(1, self.layout.num_kv_heads)
        keys_BKG = pad_sequence([each.T for each in lists], batch_first=True)
        return Picks(keys_BKG.transpose(1, 2).contiguous(), num_BG)

    def end(self, layer: int) -> None:
        """Let the longer spans' queries weigh all keys."""
        for (_, row, span), q_TNH in zip(self.longer, self._queries, strict=layer >= NUM_WHOLE_LAYERS):
            row.weigh(layer, q_TNH, span.tokens)

    def settle(self) -> None:
        """Record how many tokens have weighed, once all layers have run."""
        for row, tokens in self.rows:
            row.index.num_weighed = tokens.end


class WeighingResidency(RowResidency[W]):
    """A Residency of WeighedRows, which weighs pushed prompts before a row's first step."""

    traits = H2O

    def __init__(
        self, rows: list[W], decoder: Decoder, make_step: Callable[[Sequence[tuple[W, TokenRange]]], H2oStep[W]]
    ) -> None:
        """`rows`, `make_step`: as RowResidency takes them. Raises ConfigError for models whose pushed prompts cannot be
        run again."""
        self._pushed = PushedPrompts(decoder)
        self._make_weighed = make_step
        super().__init__(rows, self._begin)

    def copy(self, source: SlotId, target: SlotId, num_tokens: int) -> None:
        """Copy tokens in host memory. A pushed prompt is weighed once. Raises ModelError for KV that belongs to no
        token of the model."""
        self._weigh_pushed(self._rows[source], num_tokens)
        super().copy(source, target, num_tokens)

    def _begin(self, rows: Sequence[tuple[W, TokenRange]]) -> H2oStep[W]:
        """Make a step, after weighing pushed prompts. Raises RowError for a row whose pushed KV no tokens explain."""
        for row, tokens in rows:
            try:
                self._weigh_pushed(row, tokens.start)
            except ModelError as error:
                raise RowError(SlotId(self._rows.index(row)), str(error)) from error
        return self._make_weighed(rows)

    @torch.inference_mode()
    def _weigh_pushed(self, row: W, num_tokens: int) -> None:
        """Rerun those of the row's first `num_tokens` tokens that did not run here. Their queries weigh all keys."""

        def weigh(layer: int, q_TNH: Tensor, tokens: TokenRange) -> None:
            if layer >= NUM_WHOLE_LAYERS:
                row.weigh(layer, q_TNH, tokens)

        if row.index.num_weighed < num_tokens:
            self._pushed.run(row.read, TokenRange(row.index.num_weighed, num_tokens), weigh)
            row.index.num_weighed = num_tokens


class H2oResidency(WeighingResidency[H2oRow]):
    """A Residency whose rows attend to heavy hitters and the latest keys, and keep all KV."""

    def __init__(self, shape: KvShape, make_memory: MakeMemory, decoder: Decoder, budget: HeavyBudget) -> None:
        """Raise ConfigError for models whose pushed prompts cannot be run again, and what is in OUT_OF_MEMORY, or
        OSError, when the slots' address space cannot be allocated."""
        rows = [H2oRow(shape, make_memory, budget) for _ in range(shape.num_slots)]
        super().__init__(rows, decoder, lambda rows: H2oStep(rows, decoder))
