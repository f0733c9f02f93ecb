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
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from baton.types import TokenRange
from generate_workers.residency.int4.format import Int4Format, has_int4_kernel
from generate_workers.residency.int4.row import Int4Row, PackedRows
from generate_workers.residency.port import KvShape
from generate_workers.residency.rows import MakeMemory, Part
from generate_workers.residency.sparse.infinigen import PartialIndex, ScoredRow, ScoringStep
from generate_workers.residency.sparse.selective import SplitSpan
from generate_workers.residency.steps import RowResidency
from generate_workers.residency.traits import POLICIES
from modeling.forward.decoder import Decoder, SequenceSpan
from modeling.forward.selection import Picks
from modeling.kv.buffers import BufferSpan, KvPlace, KvRows
from modeling.sparse.bases import NUM_WHOLE_LAYERS, Basis
from modeling.sparse.selection_file import PreparedSelection


class ScoredInt4Row(Int4Row, ScoredRow):
    """A ScoredRow in 4 bits, with partial keys made before packing."""

    def __init__(
        self,
        form: Int4Format,
        make_memory: MakeMemory,
        max_tokens: int,
        basis: Basis,
        more: Sequence[Part] = (),
        *,
        make_home: MakeMemory | None = None,
    ) -> None:
        """`more`: what the device holds besides. `make_home`: makes memory for the packed layers where home is not the
        device's. Raises what is in OUT_OF_MEMORY, or OSError, when the slot's address space cannot be had."""
        self.partial = PartialIndex(form.plain, basis, max_tokens, make_memory)
        index = self.partial, *more
        super().__init__(form, make_memory, max_tokens, index, is_apart=make_home is not None, make_home=make_home)

    def span(self, tokens: TokenRange) -> SequenceSpan:
        """Return a span over the whole layers and the area."""
        return SplitSpan(BufferSpan(self.whole.buffer, tokens), AreaSpan(self, tokens))


@dataclass(frozen=True)
class AreaSpan:
    """A SequenceSpan over a row's area, in the layers that choose."""

    row: ScoredInt4Row
    tokens: TokenRange

    def own(self, layer: int) -> Tensor:
        return self._area.own(layer)

    def segments(self, layer: int) -> Iterator[KvRows]:
        """Yield the span's KV. The area holds only the picked keys of a row of one new token, for the native decode
        kernel; other attention gets an unpacked copy of all earlier keys."""
        if len(self.tokens) != 1:
            yield from self._area.segments(layer)
            return
        old = TokenRange(0, self.tokens.start)
        yield self.row.unpacked(NUM_WHOLE_LAYERS + layer, old).rows(0, old)
        yield self.row.area.buffer.rows(0, self.tokens)

    def place(self) -> KvPlace:
        return self._area.place()

    @property
    def _area(self) -> BufferSpan:
        return BufferSpan(self.row.area.buffer, self.tokens)


I = TypeVar("I", bound=ScoredInt4Row)


class InfinigenInt4Step(ScoringStep[I]):
    """A step that unpacks picks and packs new tokens layer by layer, because an area holds one layer."""

    def __init__(
        self,
        form: Int4Format,
        rows: Sequence[tuple[I, TokenRange]],
        prepared: PreparedSelection,
        decoder: Decoder,
    ) -> None:
        super().__init__(rows, prepared, decoder)
        self.num_link_bytes = 0  # those of longer spans are counted as they are unpacked
        self._of_one = PackedRows(form, self.choosing)
        self._of_more = PackedRows(form, [(row, span.tokens) for _, row, span in self.longer])
        self._own_keys = [row.area.buffer.data[0, tokens.start, 0] for row, tokens in self.choosing]
        """Views of the choosing rows' own keys in the layer that runs, `[G, H]` each."""

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Choose as ScoringStep does; longer spans' keys are unpacked on return."""
        super().begin(layer, hidden_TD)
        if layer in self._layers:
            self.num_link_bytes += self._of_more.unpack(layer)

    def fetch(self, layer: int, picks: Picks, num_bytes: int) -> int:
        """Unpack the picks into the areas; return their packed bytes."""
        return self._of_one.unpack_picked(layer, picks)

    def end(self, layer: int) -> None:
        """Make the new tokens' partial keys, and pack their KV home."""
        super().end(layer)
        if layer not in self._layers:
            return
        if self.choosing:
            self.append_keys(layer, torch.stack(self._own_keys))
        self.num_link_bytes += self._of_one.pack(layer) + self._of_more.pack(layer)


class InfinigenInt4Residency(RowResidency[ScoredInt4Row]):
    """A Residency that chooses keys by partial scores, and keeps KV in 4 bits."""

    traits = POLICIES["infinigen_int4"]

    def __init__(self, shape: KvShape, make_memory: MakeMemory, prepared: PreparedSelection, decoder: Decoder) -> None:
        """`prepared` must be for `decoder`, and the kernel that packs must be there. Raises ConfigError for KV that
        cannot be packed, and what is in OUT_OF_MEMORY, or OSError, when the slots' address space cannot be had."""
        assert has_int4_kernel()
        form, most, basis = Int4Format(shape.layout), shape.max_slot_tokens, prepared.basis
        rows = [ScoredInt4Row(form, make_memory, most, basis) for _ in range(shape.num_slots)]
        super().__init__(rows, lambda rows: InfinigenInt4Step(form, rows, prepared, decoder))
