"""Residency `h2o`: attends to the keys with the largest attention so far, and to the latest keys (Zhang et al., 2023).

A Residency for `engine.step_runner`, to compare InfiniGen with. A key that H2O drops is never used again, even if a
later query would need it. Layers 0 and 1 attend to all keys, as in InfiniGen's comparisons.

As in the paper, sums include all queries. The queries of a prompt that is prefilled here are projected again from each
layer's input. A prompt that was pushed, or came from a prefix store, is rerun to get its queries, which costs a prefill
and needs only its KV (`pushed_prompts`). A prompt attends to all its keys; at its end they are reduced to the budget. A
step attends to the kept keys, including its own. Then the kept key with the smallest sum is dropped, but never one of
the latest keys. The softmax of a step covers the kept keys only.

Unlike in the paper, a dropped key stays in host memory until its sequence ends, because it shares pages with keys of
other kv heads. It is not read, and a device with separate memory does not hold it (`fetched_h2o`). A long span after
the prompt, if it occurred, would attend to all keys.

B sequences with one new token, T tokens of all sequences, N heads, G kv heads, H head dim, K kept keys.
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
from generate_workers.residency.row_parts import MakeMemory, StoredRow
from generate_workers.residency.sparse.selective import SelectiveRow, SelectiveStep
from generate_workers.residency.steps import RowResidency


class HitterIndex:
    """Heavy hitters of one sequence in each selective layer. Implements Part."""

    def __init__(
        self,
        layout: KvLayout,
        budget: HeavyBudget,
        make: Callable[[int], HeavyHitters] = HeavyHitters,
        key_bytes: int = 8,
    ) -> None:
        """`make`: function that makes the heavy hitters of one layer, which use `key_bytes` bytes per key and kv
        head."""
        self.hitters: dict[int, HeavyHitters] = {}
        """Heavy hitters by layer, while the slot is claimed."""
        self.num_weighed = 0
        """Number of leading tokens whose queries have weighed the keys."""
        self.num_prompt = 0
        """Number of tokens of the prompt."""
        self._budget, self._make, self._key_bytes = budget, make, key_bytes
        self._num_kv_heads = layout.num_kv_heads
        self._layers = range(NUM_WHOLE_LAYERS, layout.num_layers)

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of the data about the kept keys."""
        return sum(each.num_bytes for each in self.hitters.values())

    def bytes_for(self, num_tokens: int) -> int:
        """Return the number of bytes of the data about all keys, which is stored while the prompt is incomplete."""
        return len(self._layers) * self._num_kv_heads * num_tokens * self._key_bytes

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin a claim for a prompt of `num_tokens` tokens."""
        self.num_prompt = num_tokens
        self.hitters = {layer: self._make(self._num_kv_heads) for layer in self._layers}

    def weigh(self, layer: int, q_TNH: Tensor, k_SGH: Tensor) -> Tensor:
        """Add the attention weights of the last T tokens' queries to the sums of all kept keys. Once the prompt is
        complete, drop the keys that exceed the next step's budget. Return the positions of the weighed keys, `[G,
        K]`."""
        positions_GK = self.hitters[layer].take(q_TNH, k_SGH)
        if len(k_SGH) >= self.num_prompt:
            self.drop(layer)
        return positions_GK

    def drop(self, layer: int) -> None:
        """Drop the keys that exceed the next step's budget. The prompt must be complete."""
        num_heavy, num_recent = self._budget.of(self.num_prompt)
        self.hitters[layer].drop(num_heavy, num_recent - 1)  # the next token is one of the latest

    def copy_from(self, other: "HitterIndex", num_tokens: int) -> None:
        """Copy another sequence's heavy hitters, which must cover `num_tokens` tokens."""
        self.num_weighed, self.num_prompt = other.num_weighed, other.num_prompt
        for layer, hitters in self.hitters.items():
            hitters.copy_from(other.hitters[layer])

    def release(self) -> None:
        """End the claim, if there is one."""
        self.num_weighed = 0
        self.hitters = {}


class WeighedRow(StoredRow):
    """StoredRow whose keys are weighed by queries."""

    index: HitterIndex
    """Heavy hitters of each selective layer."""

    def read(self, layer: int, tokens: TokenRange) -> Tensor:
        """Return the stored KV of `tokens` in memory that can be computed with. Valid until the next call."""
        return self.kv(layer, tokens)

    def weigh(self, layer: int, q_TNH: Tensor, tokens: TokenRange) -> Tensor:
        """Weigh all kept keys by the queries of `tokens`, whose keys must be stored (see HitterIndex.weigh). Return the
        weighed keys, `[G, K]`, as indices for Picks."""
        return self.index.weigh(layer, q_TNH, self.read(layer, TokenRange(0, tokens.end))[:, 0])


W = TypeVar("W", bound=WeighedRow)


class H2oRow(SelectiveRow, WeighedRow):
    """WeighedRow that keeps all KV."""

    def __init__(self, shape: KvShape, make_memory: MakeMemory, budget: HeavyBudget) -> None:
        """Raises the errors in OUT_OF_MEMORY when the slot's address space cannot be allocated."""
        self.index = HitterIndex(shape.layout, budget)
        super().__init__(shape, make_memory, self.index)


class H2oStep(SelectiveStep[W]):
    """Step in which sequences with one new token weigh keys when they select them. Queries of longer spans are
    projected again."""

    def __init__(self, rows: Sequence[tuple[W, TokenRange]], decoder: Decoder) -> None:
        super().__init__(decoder.layout, rows)
        self._decoder = decoder
        ranges = [torch.arange(span.tokens.start, span.tokens.end) for *_, span in self.longer]
        self._steps = [Step(decoder.weights.positions.lookup(each), spans=()) for each in ranges]
        """Steps that project the queries of the longer spans."""
        self._queries: list[Tensor] = []
        """Queries of the longer spans in the current layer; empty in the first two layers."""

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Project the queries of the longer spans. Their keys are not stored until the end of the layer."""
        self._queries = [
            self._decoder.project(layer, hidden_TD[at : at + len(span.tokens)], step)
            for (at, _, span), step in zip(self.longer, self._steps, strict=True)
            if layer >= NUM_WHOLE_LAYERS
        ]

    def choose(self, layer: int, q_BNH: Tensor) -> Picks:
        """Return the keys that each sequence has kept, and its new token."""
        lists = [
            row.weigh(layer, q_NH.unsqueeze(0), tokens)
            for (row, tokens), q_NH in zip(self.choosing, q_BNH, strict=True)
        ]
        num_B = torch.tensor([each.shape[1] for each in lists], dtype=torch.int32)
        num_BG = num_B.unsqueeze(1).repeat(1, self.layout.num_kv_heads)
        keys_BKG = pad_sequence([each.T for each in lists], batch_first=True)
        return Picks(keys_BKG.transpose(1, 2).contiguous(), num_BG)

    def end(self, layer: int) -> None:
        """Weigh all keys by the queries of the longer spans."""
        for (_, row, span), q_TNH in zip(self.longer, self._queries, strict=layer >= NUM_WHOLE_LAYERS):
            row.weigh(layer, q_TNH, span.tokens)

    def settle(self) -> None:
        """Record how many tokens' queries have weighed the keys, after all layers."""
        for row, tokens in self.rows:
            row.index.num_weighed = tokens.end


class WeighingResidency(RowResidency[W]):
    """Residency of WeighedRows, which weighs a pushed prompt before the first step of its sequence."""

    traits = H2O

    def __init__(
        self, rows: list[W], decoder: Decoder, make_step: Callable[[Sequence[tuple[W, TokenRange]]], H2oStep[W]]
    ) -> None:
        """`rows`, `make_step`: see RowResidency. Raises ConfigError for models whose pushed prompts cannot be rerun."""
        self._pushed = PushedPrompts(decoder)
        self._make_weighed = make_step
        super().__init__(rows, self._begin)

    def copy(self, source: SlotId, target: SlotId, num_tokens: int) -> None:
        """Copy tokens in host memory. A pushed prompt is weighed first. Raises ModelError for KV that does not belong
        to a token of the model."""
        self._weigh_pushed(self._rows[source], num_tokens)
        super().copy(source, target, num_tokens)

    def _begin(self, rows: Sequence[tuple[W, TokenRange]]) -> H2oStep[W]:
        """Weigh pushed prompts, then make a step. Raises RowError for a sequence whose pushed KV does not belong to
        tokens of the model."""
        for row, tokens in rows:
            try:
                self._weigh_pushed(row, tokens.start)
            except ModelError as error:
                raise RowError(SlotId(self._rows.index(row)), str(error)) from error
        return self._make_weighed(rows)

    @torch.inference_mode()
    def _weigh_pushed(self, row: W, num_tokens: int) -> None:
        """Rerun those of the sequence's first `num_tokens` tokens whose queries have not weighed the keys, and weigh
        all keys by their queries."""

        def weigh(layer: int, q_TNH: Tensor, tokens: TokenRange) -> None:
            if layer >= NUM_WHOLE_LAYERS:
                row.weigh(layer, q_TNH, tokens)

        if row.index.num_weighed < num_tokens:
            self._pushed.run(row.read, TokenRange(row.index.num_weighed, num_tokens), weigh)
            row.index.num_weighed = num_tokens


class H2oResidency(WeighingResidency[H2oRow]):
    """Residency that attends to heavy hitters and the latest keys, and keeps all KV."""

    def __init__(self, shape: KvShape, make_memory: MakeMemory, decoder: Decoder, budget: HeavyBudget) -> None:
        """Raises ConfigError for models whose pushed prompts cannot be rerun, and the errors in OUT_OF_MEMORY, or
        OSError, when the slots' address space cannot be allocated."""
        rows = [H2oRow(shape, make_memory, budget) for _ in range(shape.num_slots)]
        super().__init__(rows, decoder, lambda rows: H2oStep(rows, decoder))
