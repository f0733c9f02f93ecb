"""Residency `int4`: KV lives in 4 bits (`format`); a step unpacks each layer whole, and attends to that.

A Residency for `engine.step_runner`, after FlexGen's compression (Sheng et al., 2023, section 5). Layers 0 and 1 are
kept as they are, as in InfiniGen's comparisons. KV is packed when it is stored at home, pushed or computed here, so
that home memory never holds more than codes and their groups' levels. The same packed bytes go over the link: those of
all tokens cached before a step, once, and back those of the new tokens. Attention reads one layer's area on the device,
in which a new token has the values that it had before it was packed.

On a device with memory of its own all of that lies there, codes and whole layers beside the area, so that steps send
nothing over the link; pushed KV is packed before it crosses.

A prompt that is prefilled here in chunks attends to the earlier chunks as they were packed; FlexGen, which knows no
chunks, attends to the unpacked prompt. Only where a CPU computes, with the native kernel: there the link is memory
bandwidth, and unpacking itself reads home memory, so that nothing has to be fetched ahead and there is no thread.
"""

from collections.abc import Sequence

from torch import Tensor

from baton.errors import ConfigError
from baton.types import TokenRange
from generate_workers.residency.int4.format import Int4Format, has_int4_kernel
from generate_workers.residency.int4.row import Int4Row, PackedRows
from generate_workers.residency.port import KvShape
from generate_workers.residency.rows import MakeMemory
from generate_workers.residency.steps import RowResidency, RowStep
from generate_workers.residency.traits import POLICIES
from modeling.device.port import Device
from modeling.sparse.bases import NUM_WHOLE_LAYERS


class Int4Step(RowStep[Int4Row]):
    """A StepKv that unpacks each layer into the areas before it runs, and packs its new tokens after it."""

    def __init__(self, form: Int4Format, rows: Sequence[tuple[Int4Row, TokenRange]], num_bytes_read: int) -> None:
        super().__init__(rows, num_bytes_read)
        self._packed = PackedRows(form, rows)
        self._whole_row_bytes = form.plain.row_bytes
        self._reads_home = any(row.reads_home for row, _ in rows)

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Copy the layer's cached tokens into the areas, unpacking them where they are packed."""
        if layer >= NUM_WHOLE_LAYERS:
            self._count(self._packed.unpack(layer))
            return
        for row, new in self.rows:
            old = TokenRange(0, new.start)
            row.area.buffer.span(0, old).copy_(row.kv(layer, old))
            self._count(len(old) * self._whole_row_bytes)

    def end(self, layer: int) -> None:
        """Store the new tokens' KV of the layer where it lives."""
        if layer >= NUM_WHOLE_LAYERS:
            self._count(self._packed.pack(layer))
            return
        for row, new in self.rows:
            row.kv(layer, new).copy_(row.area.buffer.span(0, new))
            self._count(len(new) * self._whole_row_bytes)

    def _count(self, num_bytes: int) -> None:
        """Count bytes that were copied, where they were copied from home or to it."""
        if self._reads_home:
            self.num_link_bytes += num_bytes


class Int4Residency(RowResidency[Int4Row]):
    """A Residency that keeps KV in 4 bits but for whole layers: at home some 28 % of bf16, on the device one layer."""

    traits = POLICIES["int4"]

    def __init__(self, shape: KvShape, make_memory: MakeMemory, *, is_apart: bool = False) -> None:
        """`is_apart`: whether `make_memory` makes the memory of a device that is not home. Raises ConfigError for KV
        that cannot be packed, or without the kernel, and what is in OUT_OF_MEMORY when the slots' address space cannot
        be had."""
        if not has_int4_kernel():
            raise ConfigError("residency = int4 needs its native kernel: install a C++ compiler, or use host or device")
        form = Int4Format(shape.layout)
        most = shape.max_slot_tokens
        rows = [Int4Row(form, make_memory, most, is_apart=is_apart) for _ in range(shape.num_slots)]
        super().__init__(rows, lambda rows: Int4Step(form, rows, shape.bytes_read(tokens for _, tokens in rows)))


def make_int4(shape: KvShape, device: Device) -> Int4Residency:
    """Make the policy over the device's memory. Raises ConfigError where it cannot run."""
    if device.torch_device.type != "cpu":
        raise ConfigError(f"residency = 'int4' is not supported on device {device.name}: use residency device or host")
    return Int4Residency(shape, device.row_memory, is_apart=not device.is_home)
