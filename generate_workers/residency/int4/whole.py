"""Residency `int4`: KV lives in 4 bits (`format`); a step unpacks each layer whole, and attends to that.

A Residency for `engine.step_runner`, after FlexGen's compression (Sheng et al., 2023, section 5). Layers 0 and 1 are
kept as they are, as in InfiniGen's comparisons. KV is packed when it is stored at home, pushed or computed here, so
that home memory never holds more than codes and their groups' levels. The same packed bytes go over the link: those of
all tokens cached before a step, once, and back those of the new tokens. Attention reads one layer's area on the device,
in which a new token has the values that it had before it was packed.

A prompt that is prefilled here in chunks attends to the earlier chunks as they were packed; FlexGen, which knows no
chunks, attends to the unpacked prompt. Only on CPUs, and with the native kernel: there the link is memory bandwidth,
and unpacking itself reads home memory, so that nothing has to be fetched ahead and there is no thread.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from baton.errors import ConfigError
from baton.ids import SlotId
from baton.types import TokenRange
from generate_workers.residency.int4.format import Int4Format, has_int4_kernel
from generate_workers.residency.int4.row import Int4Row, PackedRows
from generate_workers.residency.paged_row import MakeMemory
from generate_workers.residency.port import KvBytes, KvShape, StepRows
from generate_workers.residency.traits import POLICIES
from modeling.forward.decoder import SequenceSpan
from modeling.forward.selection import Picks
from modeling.kv.memory import PagedMemory
from modeling.sparse.bases import NUM_WHOLE_LAYERS


class Int4Step:
    """A StepKv that unpacks each layer into the areas before it runs, and packs its new tokens after it."""

    def __init__(self, form: Int4Format, rows: Sequence[tuple[Int4Row, TokenRange]], num_bytes_read: int) -> None:
        self.spans: Sequence[SequenceSpan] = [row.area_span(new) for row, new in rows]
        self.num_bytes_read = num_bytes_read
        self._rows = rows
        self._packed = PackedRows(form, rows)
        self._whole_row_bytes = form.plain.row_bytes
        self._num_whole_tokens = 0
        """Tokens copied in whole layers so far, in both directions."""

    @property
    def num_link_bytes(self) -> int:
        """Return the bytes copied over the link in this step so far."""
        return self._packed.num_link_bytes + self._num_whole_tokens * self._whole_row_bytes

    @property
    def turns(self) -> "Int4Step":
        """Return this step, which takes the turns itself."""
        return self

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Copy the layer's cached tokens into the areas, unpacking them where they are packed."""
        if layer >= NUM_WHOLE_LAYERS:
            self._packed.unpack(layer)
            return
        for row, new in self._rows:
            old = TokenRange(0, new.start)
            row.area.buffer.span(0, old).copy_(row.whole.buffer.span(layer, old))
            self._num_whole_tokens += len(old)

    def picks(self, layer: int, q_TNH: Tensor) -> Picks | None:
        """Return None: rows attend to all keys."""
        return None

    def end(self, layer: int) -> None:
        """Store the new tokens' KV of the layer at home."""
        if layer >= NUM_WHOLE_LAYERS:
            self._packed.pack(layer)
            return
        for row, new in self._rows:
            row.whole.buffer.span(layer, new).copy_(row.area.buffer.span(0, new))
            self._num_whole_tokens += len(new)


class Int4Residency:
    """A Residency that keeps all KV in 4 bits but for the whole layers."""

    traits = POLICIES["int4"]

    def __init__(self, shape: KvShape, make_memory: MakeMemory) -> None:
        """Raise ConfigError for KV that cannot be packed, or without the kernel, and what is in OUT_OF_MEMORY when the
        slots' address space cannot be had."""
        if not has_int4_kernel():
            raise ConfigError("residency = int4 needs its native kernel: install a C++ compiler, or use host or device")
        self._shape = shape
        self._form = Int4Format(shape.layout)
        self._rows = [Int4Row(self._form, make_memory, shape.max_slot_tokens) for _ in range(shape.num_slots)]
        self.num_link_bytes = 0
        """Bytes copied over the link so far, in both directions."""

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """Return the bytes of a row: at home some 28 % of what bf16 takes, on the device one layer."""
        return self._rows[0].bytes_for(num_tokens)

    def open(self, slot: SlotId, num_tokens: int, capacity_tokens: int) -> Int4Row:
        """Begin a claim; pushed KV is packed as it comes."""
        self._rows[slot].open(num_tokens, capacity_tokens)
        return self._rows[slot]

    def copy(self, source: SlotId, target: SlotId, num_tokens: int) -> None:
        """Copy tokens between two slots within home memory."""
        self._rows[target].copy_from(self._rows[source], num_tokens)

    @contextmanager
    def step(self, rows: StepRows) -> Iterator[Int4Step]:
        """Commit the new tokens, and yield spans over the areas."""
        for slot, tokens in rows:
            self._rows[slot].commit(tokens)
        num_bytes_read = self._shape.bytes_read(tokens for _, tokens in rows)
        step = Int4Step(self._form, [(self._rows[slot], new) for slot, new in rows], num_bytes_read)
        try:
            yield step
        finally:
            self.num_link_bytes += step.num_link_bytes

    def close(self) -> None:
        """Do nothing: this policy has no threads."""


def make_int4(shape: KvShape, device: torch.device) -> Int4Residency:
    """Make the policy over paged memory. Raises ConfigError where it cannot run."""
    if device.type != "cpu":
        raise ConfigError(f"residency = int4 runs on CPUs only, not on {device.type}: use host or device")
    return Int4Residency(shape, PagedMemory)
