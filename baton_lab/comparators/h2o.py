"""Residency `h2o`: attends to the keys that received the most attention so far and to the latest keys (H2O; Zhang et
al., 2023).

This is a Residency for `engine.model_runner` that serves as a comparison for InfiniGen. A key that H2O drops is never
used again, even if a later query would need it. Layers 0 and 1 attend to all keys, as in InfiniGen's comparisons.

Each key has a sum of the attention weights that it received. As in the paper, the sum includes all queries. For a
prompt that is prefilled by this process, the queries are projected again from each layer's input. A prompt that was
pushed, or that came from a prefix store, is rerun to get its queries (`pushed_prompts`). The rerun costs as much as a
prefill.

During prefill, no key is dropped. At the end of the prompt, keys are dropped until the number of kept keys is within
the budget (`HeavyBudget`). A step attends to the kept keys, including the key of its new token. Then the kept key with
the smallest sum is dropped, but never one of the latest keys. The softmax of a step covers the kept keys only.

Unlike in the paper, a dropped key stays in host memory until its sequence ends, because it shares pages with keys of
other kv heads. The dropped key is not read, and a device with separate memory does not hold it (`fetched_h2o`). If a
sequence had several new tokens in one step after its prompt, they would attend to all keys; this does not occur in
normal serving.

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
    """Heavy hitters (keys with much attention so far) of one sequence, in each layer except the first two. Implements
    RowPart (a part of a slot's memory)."""

    def __init__(
        self,
        layout: KvLayout,
        budget: HeavyBudget,
        make: Callable[[int], HeavyHitters] = HeavyHitters,
        key_bytes: int = 8,
    ) -> None:
        """Create an empty index. `make`: function that creates the HeavyHitters of one layer; its argument is the
        number of kv heads. `key_bytes`: number of bytes that a HeavyHitters object uses for each key and kv head."""
        self.hitters: dict[int, HeavyHitters] = {}
        """Heavy hitters by layer; empty while the slot is not in use."""
        self.num_weighed = 0
        """Number of the sequence's leading tokens whose queries are done: their attention weights are included in the
        keys' sums."""
        self.num_prompt = 0
        """Number of tokens of the sequence's prompt."""
        self._budget, self._make, self._key_bytes = budget, make, key_bytes
        self._num_kv_heads = layout.num_kv_heads
        self._layers = range(NUM_WHOLE_LAYERS, layout.num_layers)

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes that the positions and the sums of attention weights of the kept keys take now."""
        return sum(each.num_bytes for each in self.hitters.values())

    def bytes_for(self, num_tokens: int) -> int:
        """Return the number of bytes of the positions and sums of attention weights of `num_tokens` keys, in all layers
        except the first two. Until the prompt is complete, no key is dropped, so all keys have positions and sums."""
        return len(self._layers) * self._num_kv_heads * num_tokens * self._key_bytes

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Start to use the slot for a sequence with a prompt of `num_tokens` tokens. `capacity_tokens` is not used."""
        self.num_prompt = num_tokens
        self.hitters = {layer: self._make(self._num_kv_heads) for layer in self._layers}

    def weigh(self, layer: int, q_TNH: Tensor, k_SGH: Tensor) -> Tensor:
        """Add the attention weights of the last T tokens' queries to the sums of all kept keys. Return the positions of
        all keys whose sums were increased, `[G, K]`. If the prompt is complete, drop the keys that exceed the next
        step's budget."""
        positions_GK = self.hitters[layer].take(q_TNH, k_SGH)
        if len(k_SGH) >= self.num_prompt:
            self.drop(layer)
        return positions_GK

    def drop(self, layer: int) -> None:
        """Drop the keys of one layer that exceed the next step's budget. The prompt must be complete."""
        num_heavy, num_recent = self._budget.of(self.num_prompt)
        self.hitters[layer].drop(num_heavy, num_recent - 1)  # the next token is one of the latest

    def copy_from(self, other: "HitterIndex", num_tokens: int) -> None:
        """Copy the heavy hitters of `other`, the index of another sequence. The keys' sums must already include the
        attention weights of the queries of the first `num_tokens` tokens."""
        self.num_weighed, self.num_prompt = other.num_weighed, other.num_prompt
        for layer, hitters in self.hitters.items():
            hitters.copy_from(other.hitters[layer])

    def release(self) -> None:
        """Delete the sequence's heavy hitters."""
        self.num_weighed = 0
        self.hitters = {}


class WeighedRow(StoredRow):
    """KV storage of one sequence that sums, for each key, the attention weights that the key gets from queries."""

    index: HitterIndex
    """Heavy hitters of each layer except the first two: the kept keys and their sums of attention weights."""

    def read(self, layer: int, tokens: TokenRange) -> Tensor:
        """Return the stored KV of `tokens` in one layer, in memory that the model can compute with. Valid until the
        next call."""
        return self.kv(layer, tokens)

    def weigh(self, layer: int, q_TNH: Tensor, tokens: TokenRange) -> Tensor:
        """Add the attention weights of the queries of `tokens` to the sums of all kept keys. The KV of `tokens` must be
        stored. Return the keys whose sums were increased, `[G, K]`, as indexes in the memory that the step's
        attention reads. In this class, they are positions in the sequence."""
        return self.index.weigh(layer, q_TNH, self.read(layer, TokenRange(0, tokens.end))[:, 0])


W = TypeVar("W", bound=WeighedRow)


class H2oRow(SelectiveRow, WeighedRow):
    """KV storage of one sequence that sums the attention weights of its keys. The KV of dropped keys is stored too."""

    def __init__(self, shape: KvShape, make_memory: MakeMemory, budget: HeavyBudget) -> None:
        """Create the storage for one slot. Raises an error in OUT_OF_MEMORY if the slot's address space cannot be
        allocated."""
        self.index = HitterIndex(shape.layout, budget)
        super().__init__(shape, make_memory, self.index)


class H2oStep(SelectiveStep[W]):
    """Step in which queries weigh keys, which means that each key's sum of attention weights is increased. A sequence
    with one new token weighs its kept keys when it selects them. For a sequence with several new tokens, the queries
    are projected again, and weigh the keys at the end of each layer."""

    def __init__(self, rows: Sequence[tuple[W, TokenRange]], decoder: Decoder) -> None:
        super().__init__(decoder.layout, rows)
        self._decoder = decoder
        ranges = [torch.arange(span.tokens.start, span.tokens.end) for *_, span in self.longer]
        self._steps = [Step(decoder.weights.positions.lookup(each), spans=()) for each in ranges]
        """Positions of the new tokens of each sequence that has several new tokens. `begin` needs the positions to
        project the tokens' queries."""
        self._queries: list[Tensor] = []
        """Queries of sequences with several new tokens, in the current layer. Empty in the first two layers, whose keys
        are not weighed."""

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Compute the queries of sequences with several new tokens from the layer's input, and keep them for `end`. The
        queries are not used before `end`, because the keys of these tokens are stored only at the end of the layer."""
        self._queries = [
            self._decoder.project(layer, hidden_TD[at : at + len(span.tokens)], step)
            for (at, _, span), step in zip(self.longer, self._steps, strict=True)
            if layer >= NUM_WHOLE_LAYERS
        ]

    def choose(self, layer: int, q_BNH: Tensor) -> Picks:
        """Add the attention weights of the new tokens' queries to the sums of the kept keys. Return the keys that each
        sequence attends to: its kept keys and its new token's key."""
        lists = [
            row.weigh(layer, q_NH.unsqueeze(0), tokens)
            for (row, tokens), q_NH in zip(self.choosing, q_BNH, strict=True)
        ]
        num_B = torch.tensor([each.shape[1] for each in lists], dtype=torch.int32)
        num_BG = num_B.unsqueeze(1).repeat(1, self.layout.num_kv_heads)
        keys_BKG = pad_sequence([each.T for each in lists], batch_first=True)
        return Picks(keys_BKG.transpose(1, 2).contiguous(), num_BG)

    def end(self, layer: int) -> None:
        """For each sequence with several new tokens, add the attention weights of these tokens' queries to the sums of
        the sequence's keys. Called at the end of a layer."""
        for (_, row, span), q_TNH in zip(self.longer, self._queries, strict=layer >= NUM_WHOLE_LAYERS):
            row.weigh(layer, q_TNH, span.tokens)

    def settle(self) -> None:
        """Record for each sequence that its keys' sums include the attention weights of the new tokens' queries. Called
        after the last layer."""
        for row, tokens in self.rows:
            row.index.num_weighed = tokens.end


class WeighingResidency(RowResidency[W]):
    """Base class of residencies that weigh keys: they sum the attention weights that each key gets from queries. The KV
    of a pushed prompt comes without queries, so the prompt's keys are weighed before the first step of its sequence."""

    traits = H2O

    def __init__(
        self, rows: list[W], decoder: Decoder, make_step: Callable[[Sequence[tuple[W, TokenRange]]], H2oStep[W]]
    ) -> None:
        """Create the residency. `rows`: storage of each slot. `make_step`: function that creates a step over sequences.
        Raises ConfigError if prompts whose KV was pushed cannot be rerun with this model."""
        self._pushed = PushedPrompts(decoder)
        self._make_weighed = make_step
        super().__init__(rows, self._begin)

    def copy(self, source: SlotId, target: SlotId, num_tokens: int) -> None:
        """Copy the KV of the first `num_tokens` tokens, and the keys' sums of attention weights, from one slot to
        another. If the prompt's KV was pushed to the source slot and the sums do not exist yet, compute the sums first.
        Raises ModelError if the prompt's token ids, which are needed for this, cannot be recovered from the pushed
        KV."""
        self._weigh_pushed(self._rows[source], num_tokens)
        super().copy(source, target, num_tokens)

    def _begin(self, rows: Sequence[tuple[W, TokenRange]]) -> H2oStep[W]:
        """Compute the keys' sums of attention weights for pushed prompts that lack them, then create a step. Raises
        RowError for a sequence whose token ids cannot be recovered from its pushed KV."""
        for row, tokens in rows:
            try:
                self._weigh_pushed(row, tokens.start)
            except ModelError as error:
                raise RowError(SlotId(self._rows.index(row)), str(error)) from error
        return self._make_weighed(rows)

    @torch.inference_mode()
    def _weigh_pushed(self, row: W, num_tokens: int) -> None:
        """Rerun those of the sequence's first `num_tokens` tokens whose attention weights are not included in the keys'
        sums yet, and add these weights."""

        def weigh(layer: int, q_TNH: Tensor, tokens: TokenRange) -> None:
            if layer >= NUM_WHOLE_LAYERS:
                row.weigh(layer, q_TNH, tokens)

        if row.index.num_weighed < num_tokens:
            self._pushed.run(row.read, TokenRange(row.index.num_weighed, num_tokens), weigh)
            row.index.num_weighed = num_tokens


class H2oResidency(WeighingResidency[H2oRow]):
    """Residency that attends to heavy hitters (keys with much attention so far) and the latest keys. It keeps all KV in
    memory."""

    def __init__(self, shape: KvShape, make_memory: MakeMemory, decoder: Decoder, budget: HeavyBudget) -> None:
        """Create the residency for all slots. Raises ConfigError if prompts whose KV was pushed cannot be rerun with
        this model. Raises OSError or an error in OUT_OF_MEMORY if the slots' address space cannot be allocated."""
        rows = [H2oRow(shape, make_memory, budget) for _ in range(shape.num_slots)]
        super().__init__(rows, decoder, lambda rows: H2oStep(rows, decoder))
