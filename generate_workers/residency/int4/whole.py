"""Residency `int4`: KV is stored in 4 bits (`format`); a step unpacks each layer whole, and attends to that.

A Residency for `engine.step_runner`, after FlexGen's compression (Sheng et al., 2023, section 5). Layers 0 and 1 are
not packed, as in InfiniGen's comparisons. KV of the other layers, pushed or computed here, is packed when it is stored,
so that host memory only holds codes and their groups' levels. The same packed bytes cross the link: once per step those
of all tokens cached before it, and back those of the new tokens. Attention reads one layer's area on the device, in
which a new token has its values from before packing.

On a device with memory of its own, codes and whole layers are stored there as well, so that steps send no KV over the
link. Pushed KV is packed before it crosses.

A prompt that is prefilled here in chunks attends to the packed values of earlier chunks. FlexGen, which has no chunks,
attends to the unpacked prompt. The policy needs a CPU that computes, and its native kernel. There the link is memory
bandwidth, and unpacking itself reads host memory, so that fetching ahead and a thread for it are not needed.
"""

from collections.abc import Sequence

from torch import Tensor

from baton.errors import ConfigError
from baton.modeling.device.port import Device
from baton.modeling.sparse.bases import NUM_WHOLE_LAYERS
from baton.types import TokenRange
from generate_workers.residency.int4.format import Int4Format, has_int4_kernel
from generate_workers.residency.int4.row import Int4Row, PackedRows
from generate_workers.residency.port import KvShape
from generate_workers.residency.row_parts import MakeMemory
from generate_workers.residency.steps import RowResidency, RowStep
from generate_workers.residency.traits import POLICIES


class Int4Step(RowStep[Int4Row]):
    """StepKv that unpacks each layer into the areas before it runs, and packs its new tokens after it."""

    def __init__(self, form: Int4Format, rows: Sequence[tuple[Int4Row, TokenRange]], num_bytes_read: int) -> None:
        super().__init__(rows, num_bytes_read)
        self._packed = PackedRows(form, rows)
        self._whole_row_bytes = form.plain.row_bytes
        self._reads_home = any(row.reads_home for row, _ in rows)

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Copy the layer's cached tokens into the areas, unpacked."""
        if layer >= NUM_WHOLE_LAYERS:
            self._count(self._packed.unpack(layer))
            return
        for row, new in self.rows:
            old = TokenRange(0, new.start)
            row.area.buffer.span(0, old).copy_(row.kv(layer, old))
            self._count(len(old) * self._whole_row_bytes)

    def end(self, layer: int) -> None:
        """Store the layer's new KV, packed unless the layer is whole."""
        if layer >= NUM_WHOLE_LAYERS:
            self._count(self._packed.pack(layer))
            return
        for row, new in self.rows:
            row.kv(layer, new).copy_(row.area.buffer.span(0, new))
            self._count(len(new) * self._whole_row_bytes)

    def _count(self, num_bytes: int) -> None:
        """Count copied bytes as link bytes if the KV is in host memory."""
        if self._reads_home:
            self.num_link_bytes += num_bytes


class Int4Residency(RowResidency[Int4Row]):
    """Residency that stores KV in 4 bits, except whole layers: some 28 % of bf16, with one layer on the device."""

    traits = POLICIES["int4"]

    def __init__(self, shape: KvShape, make_memory: MakeMemory, *, is_apart: bool = False) -> None:
        """`is_apart`: True if `make_memory` makes memory of a device with memory of its own. Raises ConfigError for KV
        that cannot be packed, or without the kernel; an error of OUT_OF_MEMORY when the slots' address space cannot be
        reserved."""
        if not has_int4_kernel():
            raise ConfigError("residency = int4 needs its native kernel: install a C++ compiler, or use host or device")
        form = Int4Format(shape.layout)
        rows = [Int4Row(shape, make_memory, is_apart=is_apart) for _ in range(shape.num_slots)]
        super().__init__(rows, lambda rows: Int4Step(form, rows, shape.bytes_read(tokens for _, tokens in rows)))


def make_int4(shape: KvShape, device: Device) -> Int4Residency:
    """Make the policy over the device's memory. Raises ConfigError on a device that does not support it."""
    if device.torch_device.type != "cpu":
        raise ConfigError(f"residency = 'int4' is not supported on device {device.name}: use residency device or host")
    return Int4Residency(shape, device.row_memory, is_apart=not device.is_home)
