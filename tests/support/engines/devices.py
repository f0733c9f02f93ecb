"""Devices for tests whose memory reads as NaN until it is written: the CPU, a GPU, and devices that replace a GPU on a
CPU."""

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
from baton.modeling.kv.buffers import TORCH_DTYPES, HostAccess, KvBuffer
from baton.modeling.kv.pool_memory import MappedPool, TensorPool
from baton.modeling.kv.row_memory import PAGE_BYTES, PagedMemory, TensorMemory
from baton.types import KvLayout, TokenRange


class PoisonedMemory(PagedMemory):
    """Memory in which a read of unwritten KV is detected: it is NaN, which spreads to all results."""

    def commit(self, tokens: TokenRange, layer: int | None = None) -> None:
        had_LP = self._has_page_LP.copy()
        super().commit(tokens, layer)
        for at, page in np.argwhere(self._has_page_LP & ~had_LP):
            ctypes.memset(self.address + int(at) * self._layer_bytes + int(page) * PAGE_BYTES, 0xFF, PAGE_BYTES)


class PoisonedPool(MappedPool):
    """Memory of pages in which a read of anything not written since the page was allocated is detected."""

    def take(self, pages: Sequence[int]) -> None:
        super().take(pages)
        self.data_LPS2GH[:, list(pages)] = float("nan")


class PoisonedCpu(CpuDevice):
    """CPU with poisoned memory."""

    def pool_memory(self, layout: KvLayout, num_pages: int, page_tokens: int) -> MappedPool:
        return PoisonedPool(layout, num_pages, page_tokens)

    def row_memory(self, layout: KvLayout, max_tokens: int) -> PagedMemory:
        return PoisonedMemory(layout, max_tokens)

    home_memory = row_memory


class PoisonedDevice(EmulatedDevice):
    """Emulated device with poisoned memory. By default, the speed of its link is not limited."""

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
    """Tensor memory as on a GPU. A row is filled with NaN when it is opened."""

    def expect(self, num_tokens: int) -> None:
        had = self.num_bytes
        super().expect(num_tokens)
        if not had:
            self.data_LS2GH.fill_(torch.nan)


class PoisonedCuda(CudaDevice):
    """GPU with poisoned memory."""

    def row_memory(self, layout: KvLayout, max_tokens: int) -> TensorMemory:
        return PoisonedTensors(layout, max_tokens, self.torch_device, access=self._access)

    def buffer(self, layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        made = super().buffer(layout, tokens)
        made.data.fill_(torch.nan)
        return made


class PoisonedTensorPool(TensorPool):
    """Pages as on a GPU. Free pages are filled with NaN."""

    def __init__(
        self, layout: KvLayout, num_pages: int, page_tokens: int, device: torch.device, access: HostAccess
    ) -> None:
        super().__init__(layout, num_pages, page_tokens, device, access)
        self.data_LPS2GH.fill_(torch.nan)

    def give(self, pages: Sequence[int]) -> None:
        super().give(pages)
        self.data_LPS2GH[:, list(pages)] = torch.nan


class TensorDevice:
    """CPU device that behaves like a GPU except for its speed: it has tensor memory, a link, and kernels written in
    torch. Implements Device. It does not check addresses. It verifies that memory is used as a GPU requires, on a
    machine without a GPU."""

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
        return PoisonedTensorPool(layout, num_pages, page_tokens, self.torch_device, self._access)

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
    """Return the same model on an emulated device."""
    return Decoder(decoder.config, decoder.weights, device=device or PoisonedDevice())


STANDING_FOR_A_GPU = {"emulated": PoisonedDevice, "tensors": TensorDevice}
"""CPU devices that run the code paths of a GPU, by name."""


def device_for_tests(name: str) -> Device:
    """Return a device by name: cpu, cuda, or a name in STANDING_FOR_A_GPU."""
    makers: dict[str, Callable[[], Device]] = {"cpu": PoisonedCpu, "cuda": PoisonedCuda, **STANDING_FOR_A_GPU}
    return makers[name]()
