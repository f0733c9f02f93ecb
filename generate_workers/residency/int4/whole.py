"""Residency `int4`: KV is stored in 4 bits (`format`). A step unpacks all KV of each layer, and attends to all of it.

A Residency for `engine.model_runner`, after FlexGen's compression (Sheng et al., 2023, section 5). Layers 0 and 1 are
not packed, as in InfiniGen's comparisons. The KV of the other layers, pushed or computed here, is packed when it is
stored, so that host memory holds only packed KV of these layers. In each step, the packed KV of all earlier tokens
crosses the link to the device, and the packed KV of the new tokens crosses the link to host memory. Attention reads an
area: device memory for the KV of one layer. The area holds the unpacked KV of earlier tokens, and the KV of new tokens
as it was computed, before packing.

If the device has its own memory, all KV is stored only on the device: packed KV, and layers 0 and 1. Steps then send no
KV over the link. Pushed KV is packed before it crosses the link. The only such device that is supported is one that a
CPU emulates.

If a prompt is prefilled here in chunks, a chunk attends to KV of earlier chunks that was rounded to 4 bits. FlexGen,
which has no chunks, attends to the prompt's KV before it is rounded. The policy needs its native kernel, and a CPU or a
device that a CPU emulates. On a CPU, copies over the link are limited by the memory bandwidth. No thread fetches layers
ahead, because unpacking reads host memory directly.
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
    """Step that unpacks the KV of each layer before the layer runs, into the slots' areas (device memory for one
    layer's KV). After the layer has run, the step packs the new tokens' KV."""

    def __init__(self, form: Int4Format, rows: Sequence[tuple[Int4Row, TokenRange]], num_bytes_read: int) -> None:
        super().__init__(rows, num_bytes_read)
        self._packed = PackedRows(form, rows)
        self._whole_row_bytes = form.plain.row_bytes
        self._reads_home = any(row.reads_home for row, _ in rows)

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Fill the slots' areas (device memory for one layer's KV) with the KV of the layer's cached tokens. The KV is
        unpacked. In layers 0 and 1, which are not packed, it is copied."""
        if layer >= NUM_WHOLE_LAYERS:
            self._count(self._packed.unpack(layer))
            return
        for row, new in self.rows:
            old = TokenRange(0, new.start)
            row.area.buffer.span(0, old).copy_(row.kv(layer, old))
            self._count(len(old) * self._whole_row_bytes)

    def end(self, layer: int) -> None:
        """Store the KV of the new tokens in `layer`. It is packed, except in layers 0 and 1."""
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
    """Residency that stores KV in 4 bits, except in layers 0 and 1. The device holds one unpacked layer. KV in 4 bits
    needs about 28 % of the bytes of bf16."""

    traits = POLICIES["int4"]

    def __init__(self, shape: KvShape, make_memory: MakeMemory, *, is_apart: bool = False) -> None:
        """Make the memory of all slots. `is_apart`: True if the device has its own memory, which `make_memory`
        allocates; False if `make_memory` allocates host memory. Raises ConfigError if KV cannot be packed or the kernel
        cannot be loaded, and an error of OUT_OF_MEMORY if the slots' address space cannot be reserved."""
        if not has_int4_kernel():
            raise ConfigError("residency = int4 needs its native kernel: install a C++ compiler, or use host or device")
        form = Int4Format(shape.layout)
        rows = [Int4Row(shape, make_memory, is_apart=is_apart) for _ in range(shape.num_slots)]
        super().__init__(rows, lambda rows: Int4Step(form, rows, shape.bytes_read(tokens for _, tokens in rows)))


def make_int4(shape: KvShape, device: Device) -> Int4Residency:
    """Return residency policy `int4` with memory of `device`. Raises ConfigError if the device does not support it."""
    if device.torch_device.type != "cpu":
        raise ConfigError(f"residency = 'int4' is not supported on device {device.name}: use residency device or host")
    return Int4Residency(shape, device.row_memory, is_apart=not device.is_home)
