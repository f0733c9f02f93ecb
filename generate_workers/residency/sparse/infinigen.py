"""Residency `infinigen`: keys are selected by approximate partial scores (InfiniGen; Lee et al., OSDI 2024).

A Residency for `engine.model_runner`; `baton.modeling.forward.selection` selects. A partial key is the projection of a
key to a few columns of a basis, which suffice to approximate the key's scores (baton.modeling.sparse.bases). A partial
key is stored for every key. Partial keys need a fraction of the keys' bytes, and a step reads all of them instead of
all keys. Sequences then attend to the keys with the best approximate scores, with the true keys and queries.

With lookahead 1, as in the paper, the queries of layer l are guessed before layer l - 1 runs, so that the selected keys
can be fetched in time. The guess is computed from the input of layer l - 1, with the norm and weights of layer l, at
the token's position. With lookahead 0, the true queries select keys. This suits devices that fetch no KV, such as a
CPU, whose kernel reads the stored KV.

    KV pushed, copied from a slot, of a prompt's chunk or of new tokens   ->  `home`  ->  partial keys
    begin l - 1 (guessed) or picks l (true queries)                       ->  scores over partial keys  ->  picks of l

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
    """RowPart of a slot: partial keys for one basis, in the layers that select keys. Implementations store the partial
    keys."""

    layers: range
    """Layers of the model that have partial keys."""
    _basis: Basis

    def expect(self, num_tokens: int) -> None:
        """Reserve memory for `num_tokens` tokens."""
        ...

    def write(self, layer: int, first: int, k_TGH: Tensor, projection: KeyProjection) -> None:
        """Make and store the partial keys of consecutive tokens, the first of which has index `first`."""
        ...

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin a claim. `num_tokens`: tokens that are certain to be written."""
        self.expect(num_tokens)

    def add(self, layer: int, first: int, kv_T2GH: Tensor) -> None:
        """Make the partial keys of consecutive tokens, the first of which has index `first`, if the layer selects
        keys."""
        if layer in self.layers:
            self.add_keys(layer, first, kv_T2GH[:, 0])

    def add_keys(self, layer: int, first: int, k_TGH: Tensor) -> None:
        """Make the partial keys of consecutive tokens, the first of which has index `first`, in a layer that selects
        keys."""
        self.write(layer, first, k_TGH, self._basis.key_projection(layer))


class PartialIndex(PartialKeys, PartialPart):
    """PartialPart that stores the partial keys in CPU memory."""

    def __init__(self, layout: KvLayout, basis: Basis, max_tokens: int, make_memory: MakeMemory = PagedMemory) -> None:
        """Raise OSError when the address space cannot be reserved."""
        layers = range(NUM_WHOLE_LAYERS, layout.num_layers)
        super().__init__(layers, layout.num_kv_heads, basis.num_columns, max_tokens, make_memory)
        self._basis = basis


class ScoredKeys(Protocol):
    """Partial keys of those sequences of a step that have one new token."""

    def append(self, layer: int, k_BGH: Tensor, projection: KeyProjection) -> None:
        """Make and store the new tokens' partial keys."""

    def select(
        self,
        layer: int,
        q_BNR: Tensor,
        selection: Selection,
        *,
        has_new: bool,
        closeness_BGS: Tensor | None = None,
    ) -> Picks:
        """Return the keys that the sequences attend to in `layer`. See `PartialRows.select` for the arguments."""


MakeScored = Callable[[Sequence[Any], Sequence[int], Sequence[int]], ScoredKeys]
"""Function that makes ScoredKeys. Arguments: the sequences' PartialParts, their numbers of keys including the new
token's, and their numbers of tokens."""


class ScoredRow(StoredRow):
    """StoredRow that also stores partial keys."""

    partial: PartialPart
    """Partial keys of the stored keys."""

    def take_in(self, layer: int, tokens: TokenRange, kv_T2GH: Tensor) -> None:
        """Make the partial keys of new tokens."""
        self.partial.add(layer, tokens.start, kv_T2GH)


class InfinigenRow(SelectiveRow, ScoredRow):
    """ScoredRow whose new keys can still be read after all layers have run."""

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
        """`num_places`: number of tokens for which the layers that select keys have room; None: all tokens.
        `reads_home`: see SelectiveRow. Raises an error of OUT_OF_MEMORY, or OSError, if the slot's address space cannot
        be reserved."""
        self.partial = PartialIndex(shape.layout, basis, num_places or shape.max_slot_tokens, make_memory)
        super().__init__(shape, make_memory, self.partial, num_places, reads_home=reads_home)

    def own_keys(self, position: int) -> Tensor:
        """Return a view `[L, G, H]` of the keys of a step's new token, in the layers that select keys."""
        return self.others.buffer.data[:, self.num_kept(position), 0]


S = TypeVar("S", bound=ScoredRow)


class ScoringStep(SelectiveStep[S]):
    """Step that scores partial keys. A subclass makes the partial keys of the selecting sequences' new tokens. They are
    needed only after the step, because a token's own key is always selected."""

    def __init__(
        self,
        rows: Sequence[tuple[S, TokenRange]],
        prepared: PreparedSelection,
        decoder: Decoder,
        make_scored: MakeScored = PartialRows,
    ) -> None:
        """`make_scored`: function that makes the ScoredKeys of the sequences' partial keys, on the device that stores
        the partial keys."""
        super().__init__(decoder.layout, rows)
        self._places_B = self._places_B.to(decoder.device.torch_device)
        self._prepared = prepared
        self._decoder = decoder
        self._layers = range(NUM_WHOLE_LAYERS, decoder.layout.num_layers)
        self._guessed: dict[int, Picks] = {}
        """Keys by layer that were selected one layer early, until the layer uses them."""
        if self.choosing and self._layers:
            lengths = [row.num_kept(tokens.start) + 1 for row, tokens in self.choosing]
            num_tokens = [tokens.end for _, tokens in self.choosing]
            self._partial = make_scored([row.partial for row, _ in self.choosing], lengths, num_tokens)
            positions = decoder.weights.positions.lookup(self.lengths_B.long() - 1)
            self._step = Step(positions, spans=())

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """With lookahead 1, guess the next layer's queries, and select the next layer's keys."""
        if self._prepared.lookahead and self.choosing and layer + 1 in self._layers:
            q_BNH = self._decoder.project(layer + 1, self.of_choosing(hidden_TD), self._step)
            self._guessed[layer + 1] = self._select(layer + 1, q_BNH)

    def choose(self, layer: int, q_BNH: Tensor) -> Picks:
        if not self._prepared.lookahead:
            return self._select(layer, q_BNH)
        return self._guessed.pop(layer)

    def end(self, layer: int) -> None:
        """Make the partial keys of the longer spans' new tokens."""
        for _, row, span in self.longer:
            row.take_in(layer, span.tokens, span.own(layer))

    def append_keys(self, layer: int, k_BGH: Tensor) -> None:
        """Make the partial keys of the selecting sequences' new tokens."""
        self._partial.append(layer, k_BGH, self._prepared.basis.key_projection(layer))

    def _select(self, layer: int, q_BNH: Tensor, closeness_BGS: Tensor | None = None) -> Picks:
        """Select a layer's keys. Called once per layer, in order. `closeness_BGS`: see `PartialRows.select`."""
        prepared = self._prepared
        q_BNR = prepared.basis.queries(layer, q_BNH)
        return self._partial.select(layer, q_BNR, prepared.selection, has_new=False, closeness_BGS=closeness_BGS)


K = TypeVar("K", bound=InfinigenRow)


class InfinigenStep(ScoringStep[K]):
    """Step that makes its new tokens' partial keys in all layers at once, when the forward pass has ended."""

    def settle(self) -> None:
        """Make the partial keys of the selecting sequences' new tokens, in all layers."""
        if not self.choosing or not self._layers:
            return
        k_LBGH = torch.stack([row.own_keys(tokens.start) for row, tokens in self.choosing], dim=1)
        for layer, k_BGH in zip(self._layers, k_LBGH, strict=True):
            self.append_keys(layer, k_BGH)


class InfinigenResidency(RowResidency[InfinigenRow]):
    """Residency that selects keys by partial scores, and keeps all KV."""

    traits = POLICIES["infinigen"]

    def __init__(self, shape: KvShape, make_memory: MakeMemory, prepared: PreparedSelection, decoder: Decoder) -> None:
        """`prepared` must be for `decoder`. Raises an error of OUT_OF_MEMORY, or OSError, when the address space cannot
        be reserved."""
        rows = [InfinigenRow(shape, make_memory, prepared.basis) for _ in range(shape.num_slots)]
        super().__init__(rows, lambda rows: InfinigenStep(rows, prepared, decoder))
