"""Devices for tests: their memory shows NaN until it is written. Of a GPU too, and of what stands for one on a CPU."""

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch

from baton.modeling.device.copying import UNBOUND, CopyTensor, LinkAccess, LinkRate, PacedLink, copy_bytes
from baton.modeling.device.cpu import CpuDevice
from baton.modeling.device.cuda import CudaDevice
from baton.modeling.device.emulated import EmulatedDevice
from baton.modeling.device.port import NO_MEMORY, Device
from baton.modeling.forward.decoder import Decoder
from baton.modeling.kv.buffers import TORCH_DTYPES, KvBuffer
from baton.modeling.kv.pool_memory import MappedPool, TensorPool
from baton.modeling.kv.row_memory import PAGE_BYTES, PagedMemory, TensorMemory
from baton.types import KvLayout, TokenRange


class PoisonedMemory(PagedMemory):
    """Memory in which every row that nobody wrote shows: NaN spreads to whatever reads it."""

    def commit(self, tokens: TokenRange, layer: int | None = None) -> None:
        had_LP = self._has_page_LP.copy()
        super().commit(tokens, layer)
        for at, page in np.argwhere(self._has_page_LP & ~had_LP):
            ctypes.memset(self.address + int(at) * self._layer_bytes + int(page) * PAGE_BYTES, 0xFF, PAGE_BYTES)


class PoisonedPool(MappedPool):
    """Memory of pages in which all that was not written since a page was taken shows."""

    def take(self, pages: Sequence[int]) -> None:
        super().take(pages)
        self.data_LPS2GH[:, list(pages)] = float("nan")


class PoisonedCpu(CpuDevice):
    """The CPU."""

    def pool_memory(self, layout: KvLayout, num_pages: int, page_tokens: int) -> MappedPool:
        return PoisonedPool(layout, num_pages, page_tokens)

    def row_memory(self, layout: KvLayout, max_tokens: int) -> PagedMemory:
        return PoisonedMemory(layout, max_tokens)

    home_memory = row_memory


class PoisonedDevice(EmulatedDevice):
    """An emulated device; with a link of its own speed unless told otherwise."""

    def __init__(self, rate: LinkRate = UNBOUND, copy: CopyTensor = copy_bytes) -> None:
        super().__init__(rate)
        self.link._copy = copy

    def row_memory(self, layout: KvLayout, max_tokens: int) -> PagedMemory:
        return PoisonedMemory(layout, max_tokens, self.arena, self._access)

    def pool_memory(self, layout: KvLayout, num_pages: int, page_tokens: int) -> MappedPool:
        return PoisonedPool(layout, num_pages, page_tokens, self.arena, self._access)

    def home_memory(self, layout: KvLayout, max_tokens: int) -> PagedMemory:
        return PoisonedMemory(layout, max_tokens)


class PoisonedTensors(TensorMemory):
    """Memory of a GPU's kind, NaN when a row begins."""

    def expect(self, num_tokens: int) -> None:
        had = self.num_bytes
        super().expect(num_tokens)
        if not had:
            self.data_LS2GH.fill_(torch.nan)


class PoisonedCuda(CudaDevice):
    """A GPU."""

    def row_memory(self, layout: KvLayout, max_tokens: int) -> TensorMemory:
        return PoisonedTensors(layout, max_tokens, self.torch_device, access=self._access)

    def buffer(self, layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        made = super().buffer(layout, tokens)
        made.data.fill_(torch.nan)
        return made


class TensorDevice:
    """What is like a GPU but for its speed: memory of tensors, a link, kernels of torch, on a CPU. Implements Device.
    No address is checked. It holds that a GPU's memory is used as it must be, on a machine without one."""

    name = "cuda"
    torch_device = torch.device("cpu")
    is_home = False
    memory_use = NO_MEMORY

    def __init__(self) -> None:
        self.link = PacedLink(UNBOUND)
        self._access = LinkAccess.plain(self.link)

    def row_memory(self, layout: KvLayout, max_tokens: int) -> TensorMemory:
        return PoisonedTensors(layout, max_tokens, self.torch_device, access=self._access)

    def pool_memory(self, layout: KvLayout, num_pages: int, page_tokens: int) -> TensorPool:
        pool = TensorPool(layout, num_pages, page_tokens, self.torch_device, self._access)
        pool.data_LPS2GH.fill_(torch.nan)
        return pool

    def home_memory(self, layout: KvLayout, max_tokens: int) -> TensorMemory:
        return PoisonedTensors(layout, max_tokens, self.torch_device)

    def buffer(self, layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        shape = (layout.num_layers, len(tokens), 2, layout.num_kv_heads, layout.head_dim)
        return KvBuffer.of(layout, tokens, torch.full(shape, torch.nan, dtype=TORCH_DTYPES[layout.dtype]), self._access)

    def home_buffer(self, layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        return KvBuffer(layout, tokens)

    def bound(self, limit_bytes: int | None) -> None:
        """Do nothing, as on a GPU."""

    def require(self, address: int, num_bytes: int) -> None:
        """Do nothing, as on a GPU."""


def on_emulated(decoder: Decoder, device: EmulatedDevice | None = None) -> Decoder:
    """The same model on an emulated device."""
    return Decoder(decoder.config, decoder.weights, device=device or PoisonedDevice())


STANDING_FOR_A_GPU = {"emulated": PoisonedDevice, "tensors": TensorDevice}
"""Devices that run on a CPU what runs on a GPU, each in its way, by name."""


def device_for_tests(name: str) -> Device:
    """The device of that name: cpu, cuda, or one that stands for a GPU."""
    makers: dict[str, Callable[[], Device]] = {"cpu": PoisonedCpu, "cuda": PoisonedCuda, **STANDING_FOR_A_GPU}
    return makers[name]()
