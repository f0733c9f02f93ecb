"""Residency `infinigen`: keys that seem to matter are chosen by partial scores (InfiniGen; Lee et al., OSDI 2024).

Step 8 of a request's way (DESIGN.md, section 4). A partial key is a key in a few columns of a basis in which its scores
can nearly be told (modeling.bases); kept for every key, they take a fraction of the keys' bytes, and a step reads all
of them in place of the keys. What scores high is attended to, by the true keys and queries.

With lookahead 1, as in the paper, a layer's queries are guessed while the layer before is about to run, from what that
one runs on, with the layer's own norm and weights and at the token's own position: so its keys can be fetched in time.
With lookahead 0 the true queries choose: right where nothing has to be fetched, as on a CPU, whose kernel reads home.

    pushed KV, another row's, a prompt's chunk, a step's new tokens   ->  home  ->  partial keys, at the end of each
    begin l - 1 (guessed) or picks l (true queries)                   ->  scores over partial keys  ->  picks of l

B rows of one new token, T tokens, D hidden, N heads, G kv heads, H head dim, R columns of partial keys, L layers.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from baton.types import KvLayout, TokenRange
from generate_workers.residency.paged_row import MakeMemory, PagedRow
from generate_workers.residency.port import KvShape
from generate_workers.residency.selective import SelectiveResidency, SelectiveRow, SelectiveStep
from modeling.bases import NUM_WHOLE_LAYERS, Basis
from modeling.decoder import Decoder, Step
from modeling.kernels import native
from modeling.selection import PartialKeys, PartialRows, Picks, select_keys
from modeling.selection_file import PreparedSelection


class InfinigenRow(SelectiveRow):
    """A RowKv with partial keys of all that it holds, in the layers that choose."""

    def __init__(self, shape: KvShape, make_memory: MakeMemory, basis: Basis) -> None:
        """Raises what is in OUT_OF_MEMORY when the slot's address space cannot be had."""
        super().__init__(shape, make_memory)
        layout = shape.layout
        self._basis = basis
        self._layers = range(NUM_WHOLE_LAYERS, layout.num_layers)
        self.partial = PartialKeys(self._layers, layout.num_kv_heads, basis.num_columns, shape.max_slot_tokens)

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begins a claim."""
        super().open(num_tokens, capacity_tokens)
        self.partial.expect(num_tokens)

    @property
    def index_bytes(self) -> int:
        """Of partial keys."""
        return self.partial.num_bytes

    def index_bytes_for(self, num_tokens: int) -> int:
        """Of partial keys."""
        return self.partial.bytes_for(num_tokens)

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Copies pushed KV home, and takes its keys in."""
        super().write(layer, tokens, data)
        if layer in self._layers:
            self._take_in(layer, tokens)

    def copy_from(self, other: PagedRow, num_tokens: int) -> None:
        """Takes another row's first tokens."""
        assert isinstance(other, InfinigenRow), "rows of one policy are alike"
        super().copy_from(other, num_tokens)
        self.partial.copy_from(other.partial, num_tokens)

    def take_in(self, tokens: TokenRange) -> None:
        """Makes the partial keys of `tokens`, whose keys are at home in all layers."""
        for layer in self._layers:
            self._take_in(layer, tokens)

    def release(self) -> None:
        """Ends the claim, if there is one."""
        super().release()
        self.partial.release()

    def _take_in(self, layer: int, tokens: TokenRange) -> None:
        k_TGH = self.buffer.rows(layer, tokens).k_SGH
        self.partial.write(layer, tokens.start, self._basis.keys(layer, k_TGH))


class InfinigenStep(SelectiveStep[InfinigenRow]):
    """Scores partial keys; those of the new tokens are made when the forward has ended, for nobody needs them before:
    a token's own key is chosen in any case."""

    def __init__(
        self,
        layout: KvLayout,
        rows: Sequence[tuple[InfinigenRow, TokenRange]],
        prepared: PreparedSelection,
        decoder: Decoder,
    ) -> None:
        super().__init__(layout, rows)
        self._prepared = prepared
        self._decoder = decoder
        self._layers = range(NUM_WHOLE_LAYERS, layout.num_layers)
        self._guessed: dict[int, Picks] = {}
        """By layer, from the turn before until it is asked for."""
        if self.choosing and self._layers:
            lengths = [tokens.end for _, tokens in self.choosing]
            self._partial = PartialRows([row.partial for row, _ in self.choosing], lengths)
            positions = decoder.weights.positions.lookup(self._partial.lengths_B - 1)
            self._step = Step(positions, spans=())

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """With lookahead, guesses the next layer's queries, and chooses its keys."""
        if self._prepared.lookahead and self.choosing and layer + 1 in self._layers:
            q_BNH = self._decoder.project(layer + 1, self.of_choosing(hidden_TD), self._step)
            self._guessed[layer + 1] = self._select(layer + 1, q_BNH)

    def choose(self, layer: int, q_BNH: Tensor) -> Picks:
        if not self._prepared.lookahead:
            return self._select(layer, q_BNH)
        return self._guessed.pop(layer)

    def settle(self) -> None:
        """The new tokens' partial keys."""
        for row, tokens in self.rows:
            if len(tokens) != 1:
                row.take_in(tokens)
        if not self.choosing or not self._layers:
            return
        own = [row.buffer.data[NUM_WHOLE_LAYERS:, tokens.start, 0] for row, tokens in self.choosing]
        k_LBGH = torch.stack(own, dim=1)
        for layer, k_BGH in zip(self._layers, k_LBGH, strict=True):
            self._partial.append(layer, self._prepared.basis.keys(layer, k_BGH))

    def _select(self, layer: int, q_BNH: Tensor) -> Picks:
        prepared = self._prepared
        q_BNR = prepared.basis.queries(layer, q_BNH)
        return select_keys(q_BNR, self._partial, layer, prepared.selection, has_new=False)


class InfinigenResidency(SelectiveResidency[InfinigenRow]):
    """A Residency."""

    name: ClassVar[str] = "infinigen"

    def __init__(self, shape: KvShape, make_memory: MakeMemory, prepared: PreparedSelection, decoder: Decoder) -> None:
        """`prepared`: for `decoder`. Raises what is in OUT_OF_MEMORY, or OSError, when the slots' address space cannot
        be had."""
        super().__init__([InfinigenRow(shape, make_memory, prepared.basis) for _ in range(shape.num_slots)])
        self._layout = shape.layout
        self._prepared = prepared
        self._decoder = decoder
        native.load("key_selection")  # builds it now, not when the first KV is pushed

    def make_step(self, rows: Sequence[tuple[InfinigenRow, TokenRange]]) -> InfinigenStep:
        return InfinigenStep(self._layout, rows, self._prepared, self._decoder)
