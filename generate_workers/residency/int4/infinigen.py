"""Residency `infinigen_int4`: InfiniGen chooses keys (`sparse.infinigen`), which lie at home in 4 bits (`format`).

A Residency for `engine.step_runner`. Layers 0 and 1 are whole, and read where they lie. Of the others a step unpacks
what each kv head picks into the row's area for one layer, each K and V at its token's own place; attention reads it
there, beside the step's own token, which has the values that it had before it was packed.

    pushed KV, a prompt's chunk, a step's own token   ->  partial keys, before packing  ->  packed, home
    picks of a layer                                  ->  from home, unpacked           ->  the area, of that layer

    home    layers 0 and 1; the others packed
    device  layers 0 and 1, partial keys, the area
    link    packed: picks of the tokens before a step, and back the step's own; of longer spans, all tokens before them

So picks are those of `infinigen` wherever queries are, and a layer's error is that of its picks in 4 bits. Longer spans
(local prefill) attend to all keys, the earlier ones as they were packed.

B rows of one new token, T tokens, D hidden, N heads, G kv heads, H head dim, L layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.types import TokenRange
from generate_workers.residency.int4.format import Int4Format, has_int4_kernel
from generate_workers.residency.int4.row import Int4Row, LayerSpan, PackedRows
from generate_workers.residency.paged_row import MakeMemory
from generate_workers.residency.port import KvBytes, KvShape
from generate_workers.residency.sparse.infinigen import ScoringStep
from generate_workers.residency.sparse.selective import SelectiveResidency
from generate_workers.residency.traits import POLICIES
from modeling.forward.decoder import Decoder, SequenceSpan
from modeling.forward.selection import PartialKeys, Picks
from modeling.kernels import native
from modeling.kv.buffers import BufferSpan, KvPlace, KvRows
from modeling.sparse.bases import NUM_WHOLE_LAYERS, Basis
from modeling.sparse.selection_file import PreparedSelection


class ScoredInt4Row(Int4Row):
    """A ScoredRow in 4 bits, with partial keys made before packing."""

    def __init__(self, form: Int4Format, make_memory: MakeMemory, max_tokens: int, basis: Basis) -> None:
        """Raise what is in OUT_OF_MEMORY, or OSError, when the slot's address space cannot be had."""
        super().__init__(form, make_memory, max_tokens)
        layout = form.plain
        layers = range(NUM_WHOLE_LAYERS, layout.num_layers)
        self._partial = PartialKeys(layers, layout.num_kv_heads, basis.num_columns, max_tokens)
        self._basis = basis

    @property
    def partial(self) -> PartialKeys:
        """Return the partial keys of all keys."""
        return self._partial

    @property
    def num_bytes(self) -> KvBytes:
        """Return the committed bytes; on the device also those of whole layers and partial keys."""
        return super().num_bytes + KvBytes(device=self.whole.memory.num_bytes + self.partial.num_bytes)

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """Return the bytes of a row of that many tokens; on the device also those of whole layers and partial keys."""
        besides = self.whole.memory.bytes_for(num_tokens) + self.partial.bytes_for(num_tokens)
        return super().bytes_for(num_tokens) + KvBytes(device=besides)

    def num_kept(self, num_tokens: int) -> int:
        """Return `num_tokens`: all keys are kept."""
        return num_tokens

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin a claim; when it fails, nothing is held."""
        super().open(num_tokens, capacity_tokens)
        self.partial.expect(num_tokens)

    def span(self, tokens: TokenRange) -> SequenceSpan:
        """Return a span over the whole layers and the area."""
        return ScoredInt4Span(self, tokens)

    def take_pushed(self, layer: int, tokens: TokenRange, kv_T2GH: Tensor) -> None:
        """Pack pushed KV into place, and make its partial keys."""
        super().take_pushed(layer, tokens, kv_T2GH)
        self.take_in(layer, tokens, kv_T2GH)

    def take_in(self, layer: int, tokens: TokenRange, kv_T2GH: Tensor) -> None:
        """Make the partial keys of tokens, from KV that is not packed."""
        self.partial.write(layer, tokens.start, kv_T2GH[:, 0], self._basis.key_projection(layer))

    def copy_from(self, other: Int4Row, num_tokens: int) -> None:
        """Copy another row's first tokens, as they are packed, and their partial keys."""
        assert isinstance(other, ScoredInt4Row), "rows of one policy are alike"
        super().copy_from(other, num_tokens)
        self.partial.copy_from(other.partial, num_tokens)

    def release(self) -> None:
        """End the claim, if there is one."""
        super().release()
        self.partial.release()


@dataclass(frozen=True)
class ScoredInt4Span:
    """A SequenceSpan over the whole layers, with the area in place of the others."""

    row: ScoredInt4Row
    tokens: TokenRange

    def own(self, layer: int) -> Tensor:
        return self._inner(layer).own(layer)

    def segments(self, layer: int) -> Iterator[KvRows]:
        """Yield the span's KV. The area holds only the picked keys of a row of one new token, for the native decode
        kernel; other attention gets an unpacked copy of all earlier keys."""
        old = TokenRange(0, self.tokens.start)
        if layer < NUM_WHOLE_LAYERS or len(self.tokens) != 1:
            yield from self._inner(layer).segments(layer)
            return
        yield self.row.unpacked(layer, old).rows(0, old)
        yield self.row.area.buffer.rows(0, self.tokens)

    def place(self) -> KvPlace:
        return replace(self._whole.place(), others=self._area.place())

    @property
    def _whole(self) -> BufferSpan:
        return BufferSpan(self.row.whole.buffer, self.tokens)

    @property
    def _area(self) -> LayerSpan:
        return self.row.area_span(self.tokens)

    def _inner(self, layer: int) -> BufferSpan | LayerSpan:
        return self._whole if layer < NUM_WHOLE_LAYERS else self._area


class InfinigenInt4Step(ScoringStep[ScoredInt4Row]):
    """A step that unpacks picks and packs new tokens layer by layer, because an area holds one layer."""

    def __init__(
        self,
        form: Int4Format,
        rows: Sequence[tuple[ScoredInt4Row, TokenRange]],
        prepared: PreparedSelection,
        decoder: Decoder,
    ) -> None:
        super().__init__(form.plain, rows, prepared, decoder)
        self._of_one = PackedRows(form, self.choosing)
        self._of_more = PackedRows(form, [(row, span.tokens) for row, span in self._longer])
        self._own_keys = [row.area.buffer.data[0, tokens.start, 0] for row, tokens in self.choosing]
        """Views of the choosing rows' own keys in the layer that runs, `[G, H]` each."""

    @property
    def num_link_bytes(self) -> int:
        """Return the bytes copied so far in the layers that choose, in both directions."""
        return self._of_one.num_link_bytes + self._of_more.num_link_bytes

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Choose as ScoringStep does; longer spans' keys are unpacked on return."""
        super().begin(layer, hidden_TD)
        if layer in self._layers:
            self._of_more.unpack(layer)

    def choose(self, layer: int, q_BNH: Tensor) -> Picks:
        """Return the picks, which are unpacked on return."""
        picks = super().choose(layer, q_BNH)
        self._of_one.unpack_picked(layer, picks)
        return picks

    def end(self, layer: int) -> None:
        """Make the new tokens' partial keys, and pack their KV home."""
        super().end(layer)
        if layer not in self._layers:
            return
        if self.choosing:
            self.append_keys(layer, torch.stack(self._own_keys))
        self._of_one.pack(layer)
        self._of_more.pack(layer)


class InfinigenInt4Residency(SelectiveResidency[ScoredInt4Row]):
    """A Residency that chooses keys by partial scores, and keeps KV in 4 bits."""

    traits = POLICIES["infinigen_int4"]

    def __init__(self, shape: KvShape, make_memory: MakeMemory, prepared: PreparedSelection, decoder: Decoder) -> None:
        """`prepared` must be for `decoder`, and the kernel that packs must be there. Raises ConfigError for KV that
        cannot be packed, and what is in OUT_OF_MEMORY, or OSError, when the slots' address space cannot be had."""
        assert has_int4_kernel()
        self._form = Int4Format(shape.layout)
        most, basis = shape.max_slot_tokens, prepared.basis
        super().__init__([ScoredInt4Row(self._form, make_memory, most, basis) for _ in range(shape.num_slots)])
        self._prepared = prepared
        self._decoder = decoder
        native.load("key_selection")  # builds it now, not when the first KV is pushed

    def make_step(self, rows: Sequence[tuple[ScoredInt4Row, TokenRange]]) -> InfinigenInt4Step:
        return InfinigenInt4Step(self._form, rows, self._prepared, self._decoder)
