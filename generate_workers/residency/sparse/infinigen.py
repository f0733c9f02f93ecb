"""Residency `infinigen`: sequences attend only to the keys with the best approximate scores (InfiniGen; Lee et al.,
OSDI 2024).

A Residency for `engine.model_runner`. `baton.modeling.forward.selection` selects the keys. A partial key is the
projection of a key to a few columns of a basis (baton.modeling.sparse.bases). The columns suffice to approximate the
key's score. A partial key is stored for every key, in a fraction of the key's bytes. A step reads all partial keys
instead of all keys. Sequences then attend to the keys with the best approximate scores, using the true keys and
queries.

With lookahead 1, as in the paper, the queries of layer l are guessed before layer l - 1 runs, so that the selected keys
can be fetched in time. The guess is computed from the input of layer l - 1, with the norm and weights of layer l, at
the token's position. With lookahead 0, the true queries select keys. Lookahead 0 suits devices that fetch no KV, such
as a CPU, whose kernel reads the stored KV. In the diagram, `home` is the memory that stores KV between steps:

    KV that was pushed, copied from another slot or computed here   ->  `home`  ->  partial keys
    queries: guessed before layer l - 1, or the true ones of l      ->  scores of partial keys  ->  keys of layer l

Shape suffixes: B sequences of one new token, T tokens, D hidden, N heads, G kv heads, H head dim, R columns of partial
keys, L layers.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from baton.modeling.forward.decoder import Decoder, Step
from baton.modeling.forward.selection import KeyProjection, PartialKeys, PartialRows, Picks, Selection
from baton.modeling.kv.row_memory import PagedMemory
from baton.modeling.sparse.bases import NUM_WHOLE_LAYERS, Basis
from baton.modeling.sparse.selection_file import PreparedSelection
from baton.types import KvLayout, TokenRange
from generate_workers.residency.port import KvShape
from generate_workers.residency.row_parts import MakeMemory, RowPart, StoredRow
from generate_workers.residency.sparse.selective import SelectiveRow, SelectiveStep
from generate_workers.residency.steps import RowResidency
from generate_workers.residency.traits import POLICIES


class PartialPart(RowPart, Protocol):
    """Partial keys of one slot's sequence, in the layers that select keys; a RowPart (part of the slot's memory). A
    partial key is a key that is projected to few columns of a basis. Each instance uses a single basis. Classes that
    implement this protocol provide the memory."""

    layers: range
    """Layers of the model that have partial keys."""
    _basis: Basis

    def expect(self, num_tokens: int) -> None:
        """Reserve memory for the partial keys of `num_tokens` tokens."""
        ...

    def write(self, layer: int, first: int, k_TGH: Tensor, projection: KeyProjection) -> None:
        """Project the keys `k_TGH` of consecutive tokens with `projection`, and store the results as partial keys.
        `first`: index of the first of these tokens."""
        ...

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin the use of the slot by a new sequence. `num_tokens`: number of tokens that are certain to be written.
        `capacity_tokens` is not used."""
        self.expect(num_tokens)

    def add(self, layer: int, first: int, kv_T2GH: Tensor) -> None:
        """Compute and store the partial keys of the consecutive tokens `kv_T2GH`, if `layer` selects keys. `first`:
        index of the first of these tokens."""
        if layer in self.layers:
            self.add_keys(layer, first, kv_T2GH[:, 0])

    def add_keys(self, layer: int, first: int, k_TGH: Tensor) -> None:
        """Compute and store the partial keys of the consecutive tokens `k_TGH`. `first`: index of the first of these
        tokens. `layer` must be a layer that selects keys."""
        self.write(layer, first, k_TGH, self._basis.key_projection(layer))


class PartialIndex(PartialKeys, PartialPart):
    """PartialPart (partial keys of one slot) that stores the partial keys in CPU memory."""

    def __init__(self, layout: KvLayout, basis: Basis, max_tokens: int, make_memory: MakeMemory = PagedMemory) -> None:
        """Raises OSError when the address space cannot be reserved."""
        layers = range(NUM_WHOLE_LAYERS, layout.num_layers)
        super().__init__(layers, layout.num_kv_heads, basis.num_columns, max_tokens, make_memory)
        self._basis = basis


class ScoredKeys(Protocol):
    """Partial keys of those sequences of a step that have exactly one new token. Selects the keys with the best
    scores."""

    def append(self, layer: int, k_BGH: Tensor, projection: KeyProjection) -> None:
        """Compute and store the partial keys of the new tokens `k_BGH` in `layer`, one token per sequence."""

    def select(
        self,
        layer: int,
        q_BNR: Tensor,
        selection: Selection,
        *,
        has_new: bool,
        closeness_BGS: Tensor | None = None,
    ) -> Picks:
        """Return the keys that each sequence attends to in `layer`: those with the best scores for the queries `q_BNR`.
        See `PartialRows.select` for the arguments."""


MakeScored = Callable[[Sequence[Any], Sequence[int], Sequence[int]], ScoredKeys]
"""Function that makes the ScoredKeys of several sequences. Arguments, each with one entry per sequence: partial keys,
number of keys including the new token's key, and number of tokens. There are fewer keys than tokens if keys were
evicted."""


class ScoredRow(StoredRow):
    """Memory of one slot (a StoredRow) that also stores partial keys, with which attention selects keys."""

    partial: PartialPart
    """Partial keys of the slot's sequence, in the layers that select keys."""

    def take_in(self, layer: int, tokens: TokenRange, kv_T2GH: Tensor) -> None:
        """Compute and store the partial keys of `tokens` from their KV `kv_T2GH`, if `layer` selects keys."""
        self.partial.add(layer, tokens.start, kv_T2GH)


class InfinigenRow(SelectiveRow, ScoredRow):
    """Memory of one slot, with partial keys. All layers of KV are stored where attention reads them. Therefore the keys
    of a step's new token can still be read, in all layers, after the forward pass."""

    partial: PartialIndex

    def __init__(
        self,
        shape: KvShape,
        make_memory: MakeMemory,
        basis: Basis,
        num_places: int | None = None,
        *,
        reads_home: bool = True,
    ) -> None:
        """`basis`: projection from keys to partial keys. `num_places`: maximum number of tokens that are stored in each
        layer that selects keys; None: all tokens. `reads_home`: True if `make_memory` returns host memory, from which
        attention reads the KV directly. False if it returns memory of a separate device. Raises an error of
        OUT_OF_MEMORY, or OSError, if the slot's address space cannot be reserved."""
        self.partial = PartialIndex(shape.layout, basis, num_places or shape.max_slot_tokens, make_memory)
        super().__init__(shape, make_memory, self.partial, num_places, reads_home=reads_home)

    def own_keys(self, position: int) -> Tensor:
        """Return a view `[L, G, H]` of the keys of a step's new token, whose position in the sequence is `position`, in
        the layers that select keys."""
        return self.others.buffer.data[:, self.num_kept(position), 0]


S = TypeVar("S", bound=ScoredRow)


class ScoringStep(SelectiveStep[S]):
    """Step that selects keys by the scores of partial keys. For the sequences that select keys, a subclass must compute
    the partial keys of the new tokens before the step ends. A new token's partial key is not needed earlier, because
    the token's key is always selected in its own step, without a score."""

    def __init__(
        self,
        rows: Sequence[tuple[S, TokenRange]],
        prepared: PreparedSelection,
        decoder: Decoder,
        make_scored: MakeScored = PartialRows,
    ) -> None:
        """`prepared`: results of `baton prepare` for the model of `decoder`, with which keys are selected.
        `make_scored`: function that makes an object with the partial keys of several sequences. The object computes on
        the device that stores the partial keys."""
        super().__init__(decoder.layout, rows)
        self._places_B = self._places_B.to(decoder.device.torch_device)
        self._prepared = prepared
        self._decoder = decoder
        self._layers = range(NUM_WHOLE_LAYERS, decoder.layout.num_layers)
        self._guessed: dict[int, Picks] = {}
        """Selected keys by layer, for layers whose keys were selected one layer early. A layer's entry is removed when
        the layer runs."""
        if self.choosing and self._layers:
            lengths = [row.num_kept(tokens.start) + 1 for row, tokens in self.choosing]
            num_tokens = [tokens.end for _, tokens in self.choosing]
            self._partial = make_scored([row.partial for row, _ in self.choosing], lengths, num_tokens)
            positions = decoder.weights.positions.lookup(self.lengths_B.long() - 1)
            self._step = Step(positions, spans=())

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """With lookahead 1, guess the queries of layer `layer` + 1 from `hidden_TD`, and select the keys of that layer.
        With lookahead 0, do nothing."""
        if self._prepared.lookahead and self.choosing and layer + 1 in self._layers:
            q_BNH = self._decoder.project(layer + 1, self.of_choosing(hidden_TD), self._step)
            self._guessed[layer + 1] = self._select(layer + 1, q_BNH)

    def choose(self, layer: int, q_BNH: Tensor) -> Picks:
        if not self._prepared.lookahead:
            return self._select(layer, q_BNH)
        return self._guessed.pop(layer)

    def end(self, layer: int) -> None:
        """Compute and store the partial keys of new tokens in `layer`, for each sequence that has several new
        tokens."""
        for _, row, span in self.longer:
            row.take_in(layer, span.tokens, span.own(layer))

    def append_keys(self, layer: int, k_BGH: Tensor) -> None:
        """Compute and store the partial keys of the new tokens `k_BGH` in `layer`, one token for each sequence that
        selects keys."""
        self._partial.append(layer, k_BGH, self._prepared.basis.key_projection(layer))

    def _select(self, layer: int, q_BNH: Tensor, closeness_BGS: Tensor | None = None) -> Picks:
        """Select a layer's keys. Called once per layer, in order. `closeness_BGS`: see `PartialRows.select`."""
        prepared = self._prepared
        q_BNR = prepared.basis.queries(layer, q_BNH)
        return self._partial.select(layer, q_BNR, prepared.selection, has_new=False, closeness_BGS=closeness_BGS)


K = TypeVar("K", bound=InfinigenRow)


class InfinigenStep(ScoringStep[K]):
    """Step that computes its new tokens' partial keys after the forward pass, for all layers."""

    def settle(self) -> None:
        """Compute the partial keys of the new tokens of the sequences that select keys, in all layers."""
        if not self.choosing or not self._layers:
            return
        k_LBGH = torch.stack([row.own_keys(tokens.start) for row, tokens in self.choosing], dim=1)
        for layer, k_BGH in zip(self._layers, k_LBGH, strict=True):
            self.append_keys(layer, k_BGH)


class InfinigenResidency(RowResidency[InfinigenRow]):
    """Residency that keeps the KV of all tokens. It selects keys by approximate scores, which are computed from partial
    keys (keys reduced to few columns)."""

    traits = POLICIES["infinigen"]

    def __init__(self, shape: KvShape, make_memory: MakeMemory, prepared: PreparedSelection, decoder: Decoder) -> None:
        """`prepared`: results of `baton prepare` for the model of `decoder`, with which keys are selected. Raises an
        error of OUT_OF_MEMORY, or OSError, if the address space cannot be reserved."""
        rows = [InfinigenRow(shape, make_memory, prepared.basis) for _ in range(shape.num_slots)]
        super().__init__(rows, lambda rows: InfinigenStep(rows, prepared, decoder))
