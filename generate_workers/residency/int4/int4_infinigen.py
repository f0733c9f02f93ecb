"""Residency `infinigen_int4`: KV is stored in 4 bits (`format`), and InfiniGen selects the keys for attention
(`sparse.infinigen`).

A Residency for `engine.model_runner`. Layers 0 and 1 are not packed, and are read in place. In other layers, a step
unpacks the keys and values that each kv head selects into the slot's area (memory for one layer's KV). An unpacked
token has the same index in the area as in the sequence. Attention reads the area, which also contains the KV of the
step's new token as it was computed, before packing.

    KV that was pushed or computed here   ->  partial keys, made before packing  ->  packed, `home`
    selected keys and values of a layer   ->  from `home`, unpacked              ->  the area of the slot

    `home`  layers 0 and 1, and the other layers packed
    device  layers 0 and 1, partial keys, the area
    link    to the device: packed KV of selected tokens; if a sequence has several new tokens, of all earlier tokens
            to `home`: packed KV of new tokens

`home` is the memory that stores KV between steps. Partial keys are keys projected to fewer columns, from which scores
are estimated. For the same queries, this policy selects the same keys as `infinigen`. A layer's additional error is
therefore only the error of its selected KV in 4 bits. A sequence with several new tokens (local prefill) attends to all
keys. The KV of earlier tokens is then unpacked from 4 bits.

Shape suffixes: B sequences of one new token, T tokens, D hidden, N heads, G kv heads, H head dim, L layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from baton.modeling.forward.decoder import Decoder, SequenceSpan
from baton.modeling.forward.selection import Picks
from baton.modeling.kv.buffers import BufferSpan, KvPlace, KvRows
from baton.modeling.sparse.bases import NUM_WHOLE_LAYERS, Basis
from baton.modeling.sparse.selection_file import PreparedSelection
from baton.types import TokenRange
from generate_workers.residency.int4.format import Int4Format, has_int4_kernel
from generate_workers.residency.int4.row import Int4Row, PackedRows
from generate_workers.residency.port import KvShape
from generate_workers.residency.row_parts import MakeMemory, RowPart
from generate_workers.residency.sparse.infinigen import PartialIndex, ScoredRow, ScoringStep
from generate_workers.residency.sparse.selective import SplitSpan
from generate_workers.residency.steps import RowResidency
from generate_workers.residency.traits import POLICIES


class ScoredInt4Row(Int4Row, ScoredRow):
    """Memory of one slot that stores KV in 4 bits, and partial keys (keys projected to fewer columns), which are
    computed before the KV is packed."""

    def __init__(
        self,
        shape: KvShape,
        make_memory: MakeMemory,
        basis: Basis,
        more: Sequence[RowPart] = (),
        *,
        make_home: MakeMemory | None = None,
    ) -> None:
        """Make the memory of a slot. `more`: additional parts of the slot's memory on the device. `make_home`: function
        that makes host memory for the packed layers; None: `make_memory` makes memory for them, too. Raises ConfigError
        for KV that cannot be packed, and an error of OUT_OF_MEMORY, or OSError, if the slot's address space cannot be
        reserved."""
        self.partial = PartialIndex(shape.layout, basis, shape.max_slot_tokens, make_memory)
        index = self.partial, *more
        super().__init__(shape, make_memory, index, is_apart=make_home is not None, make_home=make_home)

    def span(self, tokens: TokenRange) -> SequenceSpan:
        """Return the SequenceSpan of a step that runs the new tokens `tokens`. It contains the KV of the layers that
        are not packed, and the slot's area. An area is device memory that holds the unpacked KV of one packed layer at
        a time."""
        return SplitSpan(BufferSpan(self.whole.buffer, tokens), AreaSpan(self, tokens))


@dataclass(frozen=True)
class AreaSpan:
    """SequenceSpan over a slot's area (memory for one layer's unpacked KV), in the layers that select keys."""

    row: ScoredInt4Row
    tokens: TokenRange

    def own(self, layer: int) -> Tensor:
        return self._area.own(layer)

    def segments(self, layer: int) -> Iterator[KvRows]:
        """Yield the KV of all tokens, for attention that does not use the native decode kernel. If there are several
        new tokens, the slot's area (device memory for one layer's KV) already contains the KV of all tokens. If there
        is one new token, the area contains only the selected keys and values. All earlier KV is then unpacked into a
        separate buffer."""
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
    """Step that unpacks the selected KV before each layer, and packs the new tokens' KV after each layer. A layer must
    be completed before the next one begins, because all layers share the slot's device memory for one unpacked
    layer."""

    def __init__(
        self,
        form: Int4Format,
        rows: Sequence[tuple[I, TokenRange]],
        prepared: PreparedSelection,
        decoder: Decoder,
    ) -> None:
        super().__init__(rows, prepared, decoder)
        self.num_link_bytes = 0  # bytes of longer spans are counted when they are unpacked
        self._of_one = PackedRows(form, self.choosing)
        self._of_more = PackedRows(form, [(row, span.tokens) for _, row, span in self.longer])
        self._own_keys = [row.area.buffer.data[0, tokens.start, 0] for row, tokens in self.choosing]
        """Views of the new tokens' keys in the current layer, one `[G, H]` for each sequence that selects keys."""

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """With lookahead 1, select the keys of layer `layer` + 1 (see ScoringStep). For sequences with several new
        tokens, also unpack all earlier KV of `layer`."""
        super().begin(layer, hidden_TD)
        if layer in self._layers:
            self.num_link_bytes += self._of_more.unpack(layer)

    def fetch(self, layer: int, picks: Picks, num_bytes: int) -> int:
        """Unpack the keys and values of `picks`, the keys that `layer` selects, into the slots' areas (device memory
        for one layer's KV). Return the number of packed bytes."""
        return self._of_one.unpack_picked(layer, picks)

    def end(self, layer: int) -> None:
        """Make the new tokens' partial keys (projections of keys to fewer columns) for `layer`, and pack the new
        tokens' KV into the memory of packed KV."""
        super().end(layer)
        if layer not in self._layers:
            return
        if self.choosing:
            self.append_keys(layer, torch.stack(self._own_keys))
        self.num_link_bytes += self._of_one.pack(layer) + self._of_more.pack(layer)


class InfinigenInt4Residency(RowResidency[ScoredInt4Row]):
    """Residency that stores KV in 4 bits, and selects keys by the scores of partial keys (keys projected to fewer
    columns)."""

    traits = POLICIES["infinigen_int4"]

    def __init__(self, shape: KvShape, make_memory: MakeMemory, prepared: PreparedSelection, decoder: Decoder) -> None:
        """Make the memory of all slots. `prepared` must have been made for the model of `decoder`, and the packing
        kernel must be loaded. Raises ConfigError if the KV cannot be packed. Raises an error of OUT_OF_MEMORY, or
        OSError, when the slots' address space cannot be reserved."""
        assert has_int4_kernel()
        form = Int4Format(shape.layout)
        rows = [ScoredInt4Row(shape, make_memory, prepared.basis) for _ in range(shape.num_slots)]
        super().__init__(rows, lambda rows: InfinigenInt4Step(form, rows, prepared, decoder))
