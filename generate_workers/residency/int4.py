"""Residency `int4`: KV lives in 4 bits (int4_format.py); a step unpacks each layer whole, and attends to that.

Step 8 of a request's way (DESIGN.md, section 4); FlexGen's compression (Sheng et al., 2023, section 5). Layers 0 and 1
are kept as they are, as in InfiniGen's comparisons. KV is packed when it comes to lie at home, be it pushed or computed
here, so that home memory never holds more than codes and what belongs to them, and what goes over the link are these
same bytes: all that were cached before a step, once, and back those of the new tokens. Attention reads one layer's area
on the device, in which a new token is what it was before it was packed.

A prompt that is prefilled here in chunks attends to the earlier chunks as they were packed; FlexGen, which knows no
chunks, attends to a prompt as it was. Only on CPUs, and with the native kernel: there the link is memory bandwidth, and
unpacking itself reads home memory, so that nothing has to be fetched ahead and there is no thread.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.errors import ConfigError
from baton.ids import SlotId
from baton.types import KvLayout, TokenRange
from generate_workers.residency.int4_format import Int4Format, has_int4_kernel
from generate_workers.residency.paged_row import MakeMemory, PagedRow
from generate_workers.residency.port import KvBytes, KvShape, StepRows
from modeling.bases import NUM_WHOLE_LAYERS
from modeling.decoder import SequenceSpan
from modeling.kv_buffers import BufferSpan, KvBuffer, KvPlace, KvRows
from modeling.kv_memory import PagedMemory
from modeling.selection import Picks


class Int4Row:
    """A RowKv: at home whole layers and packed ones, on the device an area for one layer."""

    def __init__(self, form: Int4Format, make_memory: MakeMemory, max_tokens: int) -> None:
        """Raises what is in OUT_OF_MEMORY when the slot's address space cannot be had."""
        layout = form.plain
        num_whole = min(layout.num_layers, NUM_WHOLE_LAYERS)
        self.whole = _row(replace(layout, num_layers=num_whole), make_memory, max_tokens)
        self.packed = _row(form.packed(layout.num_layers - num_whole), make_memory, max_tokens)
        self.area = _row(replace(layout, num_layers=1), make_memory, max_tokens)
        self._form = form
        self._layer_layout = replace(layout, num_layers=1)
        self._parts = (self.whole, self.packed, self.area)

    @property
    def tokens(self) -> TokenRange:
        """That the present claim may hold."""
        return self.whole.tokens

    @property
    def num_bytes(self) -> KvBytes:
        """Whole layers and packed ones, and the area."""
        return KvBytes(self.whole.memory.num_bytes + self.packed.memory.num_bytes, self.area.memory.num_bytes)

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """Likewise, of a row of that many tokens."""
        whole, packed, area = (part.memory.bytes_for(num_tokens) for part in self._parts)
        return KvBytes(whole + packed, area)

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begins a claim; when it fails, nothing is held."""
        try:
            for part in self._parts:
                part.open(num_tokens, capacity_tokens)
        except BaseException:
            self.release()
            raise

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Packs pushed KV into place."""
        if layer < NUM_WHOLE_LAYERS:
            self.whole.write(layer, tokens, data)
            return
        plain = KvBuffer(self._layer_layout, tokens)
        plain.write(0, tokens, data)
        self.packed.memory.commit(tokens, layer - NUM_WHOLE_LAYERS)
        self._form.pack(plain.span(0, tokens), self._packed_span(layer, tokens))

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """The bytes of `tokens`: the memory itself of a whole layer, a copy of a packed one, unpacked."""
        if layer < NUM_WHOLE_LAYERS:
            return self.whole.export(layer, tokens)
        plain = KvBuffer(self._layer_layout, tokens)
        self._form.unpack(self._packed_span(layer, tokens), plain.span(0, tokens))
        return plain.export(0, tokens)

    def copy_from(self, other: "Int4Row", num_tokens: int) -> None:
        """Takes another row's first tokens, as they are packed."""
        self.whole.copy_from(other.whole, num_tokens)
        self.packed.copy_from(other.packed, num_tokens)

    def release(self) -> None:
        """Ends the claim, if there is one."""
        for part in self._parts:
            part.release()

    def commit(self, tokens: TokenRange) -> None:
        """A step is about to add `tokens`."""
        self.whole.memory.commit(tokens)
        self.packed.memory.commit(tokens)
        self.area.memory.commit(TokenRange(0, tokens.end))

    def _packed_span(self, layer: int, tokens: TokenRange) -> Tensor:
        return self.packed.buffer.span(layer - NUM_WHOLE_LAYERS, tokens)


def _row(layout: KvLayout, make_memory: MakeMemory, max_tokens: int) -> PagedRow:
    return PagedRow(layout, make_memory(layout, max_tokens))


@dataclass(frozen=True)
class LayerSpan:
    """A SequenceSpan whose KV is at hand for one layer at a time."""

    inner: BufferSpan

    @property
    def tokens(self) -> TokenRange:
        return self.inner.tokens

    def own(self, layer: int) -> Tensor:
        return self.inner.own(0)

    def segments(self, layer: int) -> Iterator[KvRows]:
        return self.inner.segments(0)

    def place(self) -> KvPlace:
        return self.inner.place()


class Int4Step:
    """A StepKv: each layer comes into the areas before it runs, and its new tokens go home after it."""

    def __init__(self, form: Int4Format, rows: Sequence[tuple[Int4Row, TokenRange]], num_bytes_read: int) -> None:
        self.spans: Sequence[SequenceSpan] = [LayerSpan(BufferSpan(row.area.buffer, new)) for row, new in rows]
        self.num_bytes_read = num_bytes_read
        self.num_link_bytes = 0
        """Over the link in this step, so far."""
        self._form = form
        self._rows = rows
        self._num_old_B = torch.tensor([new.start for _, new in rows])
        self._num_new_B = torch.tensor([len(new) for _, new in rows])
        self._areas_B = torch.tensor([row.area.buffer.data.data_ptr() for row, _ in rows])
        self._packed_B = torch.tensor([row.packed.buffer.data.data_ptr() for row, _ in rows])
        packed_L = rows[0][0].packed.buffer.data
        self._layer_bytes = packed_L.stride(0) * packed_L.element_size()

    @property
    def turns(self) -> "Int4Step":
        """Itself."""
        return self

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """What was cached is in the areas on return."""
        if layer < NUM_WHOLE_LAYERS:
            for row, new in self._rows:
                old = TokenRange(0, new.start)
                row.area.buffer.span(0, old).copy_(row.whole.buffer.span(layer, old))
        else:
            self._form.unpack_rows(self._packed(layer), self._areas_B, self._num_old_B)
        self._count(layer, self._num_old_B)

    def picks(self, layer: int, q_TNH: Tensor) -> Picks | None:
        """All keys."""
        return None

    def end(self, layer: int) -> None:
        """Stores the new tokens' KV."""
        if layer < NUM_WHOLE_LAYERS:
            for row, new in self._rows:
                row.whole.buffer.span(layer, new).copy_(row.area.buffer.span(0, new))
        else:
            new_areas_B = self._areas_B + self._num_old_B * self._form.plain.row_bytes
            new_packed_B = self._packed(layer) + self._num_old_B * self._form.packed(1).row_bytes
            self._form.pack_rows(new_areas_B, new_packed_B, self._num_new_B)
        self._count(layer, self._num_new_B)

    def _packed(self, layer: int) -> Tensor:
        """Addresses of the rows' packed KV."""
        return self._packed_B + (layer - NUM_WHOLE_LAYERS) * self._layer_bytes

    def _count(self, layer: int, num_tokens_B: Tensor) -> None:
        layout = self._form.plain if layer < NUM_WHOLE_LAYERS else self._form.packed(1)
        self.num_link_bytes += int(num_tokens_B.sum()) * layout.row_bytes


class Int4Residency:
    """A Residency."""

    name = "int4"
    is_exact = False

    def __init__(self, shape: KvShape, make_memory: MakeMemory) -> None:
        """Raises ConfigError for KV that cannot be packed, or without the kernel, and what is in OUT_OF_MEMORY when the
        slots' address space cannot be had."""
        if not has_int4_kernel():
            raise ConfigError("residency = int4 needs its native kernel: install a C++ compiler, or use host or device")
        self._shape = shape
        self._form = Int4Format(shape.layout)
        self._rows = [Int4Row(self._form, make_memory, shape.max_slot_tokens) for _ in range(shape.num_slots)]
        self.num_link_bytes = 0
        """Both ways."""

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """At home some 28 % of what bf16 takes; one layer on the device."""
        return self._rows[0].bytes_for(num_tokens)

    def open(self, slot: SlotId, num_tokens: int, capacity_tokens: int) -> Int4Row:
        """Pushed KV is packed as it comes."""
        self._rows[slot].open(num_tokens, capacity_tokens)
        return self._rows[slot]

    def copy(self, source: SlotId, target: SlotId, num_tokens: int) -> None:
        """Within home memory."""
        self._rows[target].copy_from(self._rows[source], num_tokens)

    @contextmanager
    def step(self, rows: StepRows) -> Iterator[Int4Step]:
        """Spans over the areas."""
        for slot, tokens in rows:
            self._rows[slot].commit(tokens)
        num_bytes_read = self._shape.bytes_read(tokens for _, tokens in rows)
        step = Int4Step(self._form, [(self._rows[slot], new) for slot, new in rows], num_bytes_read)
        try:
            yield step
        finally:
            self.num_link_bytes += step.num_link_bytes

    def close(self) -> None:
        """No threads."""


def make_int4(shape: KvShape, device: torch.device) -> Int4Residency:
    """The policy over paged memory. Raises ConfigError where it cannot run."""
    if device.type != "cpu":
        raise ConfigError(f"residency = int4 runs on CPUs only, not on {device.type}: use host or device")
    return Int4Residency(shape, PagedMemory)
