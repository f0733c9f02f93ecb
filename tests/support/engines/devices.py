"""Devices for tests: their memory shows NaN until it is written."""

import ctypes

import numpy as np

from baton.types import KvLayout, TokenRange
from modeling.device.copying import UNBOUND, CopyTensor, LinkRate, copy_bytes
from modeling.device.cpu import CpuDevice
from modeling.device.emulated import EmulatedDevice
from modeling.forward.decoder import Decoder
from modeling.kv.memory import PAGE_BYTES, PagedMemory


class PoisonedMemory(PagedMemory):
    """Memory in which every row that nobody wrote shows: NaN spreads to whatever reads it."""

    def commit(self, tokens: TokenRange, layer: int | None = None) -> None:
        had_LP = self._has_page_LP.copy()
        super().commit(tokens, layer)
        for at, page in np.argwhere(self._has_page_LP & ~had_LP):
            ctypes.memset(self.address + int(at) * self._layer_bytes + int(page) * PAGE_BYTES, 0xFF, PAGE_BYTES)


class PoisonedCpu(CpuDevice):
    """The CPU."""

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

    def home_memory(self, layout: KvLayout, max_tokens: int) -> PagedMemory:
        return PoisonedMemory(layout, max_tokens)


def on_emulated(decoder: Decoder, device: EmulatedDevice | None = None) -> Decoder:
    """The same model on an emulated device."""
    return Decoder(decoder.config, decoder.weights, device=device or PoisonedDevice())
