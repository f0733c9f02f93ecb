"""Residency `infinigen`: keys that seem to matter are chosen by partial scores (InfiniGen; Lee et al., OSDI 2024).

A Residency for `engine.step_runner`; `modeling.forward.selection` chooses. A partial key is a key in a few columns of a
basis in which its scores can nearly be told (modeling.sparse.bases). Partial keys are kept for every key; they take a
fraction of the keys' bytes, and a step reads all of them in place of the keys. Rows attend to the keys that score
highest, by the true keys and queries.

With lookahead 1, as in the paper, a layer's queries are guessed while the layer before is about to run, from the input
of that layer, with the layer's own norm and weights and at the token's own position, so that its keys can be fetched in
time. With lookahead 0 the true queries choose: right where nothing has to be fetched, as on a CPU, whose kernel reads
home.

    pushed KV, another row's, a prompt's chunk, a step's new tokens   ->  home  ->  partial keys, behind each
    begin l - 1 (guessed) or picks l (true queries)                   ->  scores over partial keys  ->  picks of l

B rows of one new token, T tokens, D hidden, N heads, G kv heads, H head dim, R columns of partial keys, L layers.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from baton.types import KvLayout, TokenRange
from generate_workers.residency.paged_row import MakeMemory, PagedRow
from generate_workers.residency.port import KvShape
from generate_workers.residency.sparse.selective import HomeRow, SelectiveResidency, SelectiveRow, SelectiveStep
from generate_workers.residency.traits import POLICIES
from modeling.forward.decoder import Decoder, Step
from modeling.forward.selection import PartialKeys, PartialRows, Picks, select_keys
from modeling.kernels import native
from modeling.sparse.bases import NUM_WHOLE_LAYERS, Basis
from modeling.sparse.selection_file import PreparedSelection


class ScoredRow(HomeRow, Protocol):
    """A HomeRow that also keeps partial keys."""

    @property
    def partial(self) -> PartialKeys:
        """Return the partial keys of the keys that the row keeps."""
        ...

    def take_in(self, layer: int, tokens: TokenRange, kv_T2GH: Tensor) -> None:
        """Make the partial keys of new tokens of a longer span, in a layer that has run."""
        ...


class KeyedRow(ScoredRow, Protocol):
    """A ScoredRow whose keys can still be read when all layers have run."""

    def own_keys(self, position: int) -> Tensor:
        """Return the keys of a step's own token in the layers that choose, which have run: `[L, G, H]`."""
        ...


class InfinigenRow(SelectiveRow):
    """A KeyedRow with partial keys of all its tokens, in the layers that choose."""

    def __init__(self, shape: KvShape, make_memory: MakeMemory, basis: Basis) -> None:
        """Raise what is in OUT_OF_MEMORY, or OSError, when the slot's address space cannot be had."""
        super().__init__(shape, make_memory)
        layout = shape.layout
        self._basis = basis
        self._layers = range(NUM_WHOLE_LAYERS, layout.num_layers)
        self._partial = PartialKeys(self._layers, layout.num_kv_heads, basis.num_columns, shape.max_slot_tokens)

    @property
    def partial(self) -> PartialKeys:
        """Return the partial keys of all keys."""
        return self._partial

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin a claim; `num_tokens` tokens will be written for sure."""
        super().open(num_tokens, capacity_tokens)
        self.partial.expect(num_tokens)

    @property
    def index_bytes(self) -> int:
        """Return the bytes now committed for partial keys."""
        return self.partial.num_bytes

    def index_bytes_for(self, num_tokens: int) -> int:
        """Return the bytes of the partial keys of that many tokens."""
        return self.partial.bytes_for(num_tokens)

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Copy pushed KV home, and make the partial keys of its tokens."""
        super().write(layer, tokens, data)
        if layer in self._layers:
            self.take_in(layer, tokens, self.buffer.span(layer, tokens))

    def copy_from(self, other: PagedRow, num_tokens: int) -> None:
        """Copy another row's first tokens and their partial keys."""
        assert isinstance(other, InfinigenRow), "rows of one policy are alike"
        super().copy_from(other, num_tokens)
        self.partial.copy_from(other.partial, num_tokens)

    def own_keys(self, position: int) -> Tensor:
        """Return a view at home of one token's keys in the layers that choose: `[L, G, H]`."""
        return self.buffer.data[NUM_WHOLE_LAYERS:, position, 0]

    def take_in(self, layer: int, tokens: TokenRange, kv_T2GH: Tensor) -> None:
        """Make the partial keys of `tokens`, whose KV is at home."""
        self.partial.write(layer, tokens.start, kv_T2GH[:, 0], self._basis.key_projection(layer))

    def release(self) -> None:
        """End the claim, if there is one."""
        super().release()
        self.partial.release()


S = TypeVar("S", bound=ScoredRow)


class ScoringStep(SelectiveStep[S]):
    """A step that scores partial keys. A subclass makes the partial keys of the choosing rows' own tokens. The step
    does not need those before it ends, because a token's own key is always chosen."""

    def __init__(
        self,
        layout: KvLayout,
        rows: Sequence[tuple[S, TokenRange]],
        prepared: PreparedSelection,
        decoder: Decoder,
    ) -> None:
        super().__init__(layout, rows)
        self._longer = [(row, span) for (row, tokens), span in zip(rows, self.spans, strict=True) if len(tokens) != 1]
        self._prepared = prepared
        self._decoder = decoder
        self._layers = range(NUM_WHOLE_LAYERS, layout.num_layers)
        self._guessed: dict[int, Picks] = {}
        """Picks by layer, guessed in the turn before, until the layer asks for them."""
        if self.choosing and self._layers:
            lengths = [row.num_kept(tokens.start) + 1 for row, tokens in self.choosing]
            num_tokens = [tokens.end for _, tokens in self.choosing]
            self._partial = PartialRows([row.partial for row, _ in self.choosing], lengths, num_tokens)
            positions = decoder.weights.positions.lookup(self.lengths_B.long() - 1)
            self._step = Step(positions, spans=())

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """With lookahead 1, guess the next layer's queries, and choose its keys."""
        if self._prepared.lookahead and self.choosing and layer + 1 in self._layers:
            q_BNH = self._decoder.project(layer + 1, self.of_choosing(hidden_TD), self._step)
            self._guessed[layer + 1] = self._select(layer + 1, q_BNH)

    def choose(self, layer: int, q_BNH: Tensor) -> Picks:
        if not self._prepared.lookahead:
            return self._select(layer, q_BNH)
        return self._guessed.pop(layer)

    def end(self, layer: int) -> None:
        """Make the partial keys of the longer spans' new tokens."""
        if layer in self._layers:
            for row, span in self._longer:
                row.take_in(layer, span.tokens, span.own(layer))

    def append_keys(self, layer: int, k_BGH: Tensor) -> None:
        """Make the partial keys of the choosing rows' own tokens."""
        self._partial.append(layer, k_BGH, self._prepared.basis.key_projection(layer))

    def _select(self, layer: int, q_BNH: Tensor, closeness_BGS: Tensor | None = None) -> Picks:
        """Choose a layer's keys; called once a layer, in order. `closeness_BGS`: as `select_keys` takes it."""
        prepared = self._prepared
        q_BNR = prepared.basis.queries(layer, q_BNH)
        return select_keys(q_BNR, self._partial, layer, prepared.selection, has_new=False, closeness_BGS=closeness_BGS)


K = TypeVar("K", bound=KeyedRow)


class InfinigenStep(ScoringStep[K]):
    """A step that makes its own tokens' partial keys when the forward has ended, in all layers at once."""

    def settle(self) -> None:
        """Make the partial keys of the choosing rows' own tokens, in all layers."""
        if not self.choosing or not self._layers:
            return
        k_LBGH = torch.stack([row.own_keys(tokens.start) for row, tokens in self.choosing], dim=1)
        for layer, k_BGH in zip(self._layers, k_LBGH, strict=True):
            self.append_keys(layer, k_BGH)


class InfinigenResidency(SelectiveResidency[InfinigenRow]):
    """A Residency that chooses keys by partial scores, and keeps all KV."""

    traits = POLICIES["infinigen"]

    def __init__(self, shape: KvShape, make_memory: MakeMemory, prepared: PreparedSelection, decoder: Decoder) -> None:
        """`prepared` must be for `decoder`. Raises what is in OUT_OF_MEMORY, or OSError, when the slots' address space
        cannot be had."""
        super().__init__([InfinigenRow(shape, make_memory, prepared.basis) for _ in range(shape.num_slots)])
        self._layout = shape.layout
        self._prepared = prepared
        self._decoder = decoder
        native.load("key_selection")  # builds it now, not when the first KV is pushed

    def make_step(self, rows: Sequence[tuple[InfinigenRow, TokenRange]]) -> InfinigenStep[InfinigenRow]:
        return InfinigenStep(self._layout, rows, self._prepared, self._decoder)
