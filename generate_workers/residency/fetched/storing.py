"""Copies new tokens' KV to host memory while a step computes, for policies that store KV in host memory (`rows`).

Shape suffixes: T tokens, G kv heads, H head dim.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from baton.modeling.device.heads import HeadLink, RowCopies
from baton.modeling.device.port import Device
from baton.modeling.kv.transfers import Transfer


class HomeStores:
    """Copies of one step to host memory. Used on the engine's thread."""

    def __init__(self, link: HeadLink) -> None:
        self._link = link
        self._transfers: dict[int, Transfer] = {}
        """Transfers of sequences of one new token, by layer."""
        self._longer: list[Transfer] = []
        """Transfers of other sequences."""
        self.num_bytes = 0
        """Bytes of all copies begun so far."""

    def begin(self, layer: int, there: Sequence[Tensor], home: Sequence[Tensor]) -> None:
        """Begin to store the KV of a layer's new tokens, one token per sequence. All copies must have the same size."""
        self.begin_rows(layer, RowCopies(addresses(there), addresses(home), there[0].nbytes))

    def begin_rows(self, layer: int, copies: RowCopies) -> None:
        """Begin to store a layer's new tokens, one of each sequence."""
        self.num_bytes += copies.num_bytes
        self._transfers[layer] = self._link.store_rows(copies)

    def store(self, home: Tensor, there: Tensor) -> None:
        """Store contiguous KV. Waits until its device memory may be reused."""
        self.num_bytes += there.nbytes
        self._longer.append(self._link.store([(home, there)]))
        self._longer[-1].join()

    def join(self, layer: int) -> None:
        """Wait until a layer's new tokens may be overwritten on the device, if any were stored."""
        if (transfer := self._transfers.get(layer)) is not None:
            transfer.join()

    def settle(self) -> None:
        """Wait until all KV is in host memory. Raises the error of a failed copy."""
        for transfer in (*self._transfers.values(), *self._longer):
            transfer.result()

    def wait(self) -> None:
        """Wait until no copy runs, even if one failed."""
        for transfer in (*self._transfers.values(), *self._longer):
            transfer.wait()


def link_of(device: Device) -> HeadLink:
    """Return the link of a device with its own memory."""
    assert hasattr(device.link, "fetch_heads"), f"the link of {device.name} does not copy by address"
    return cast(HeadLink, device.link)


class LayerAddresses:
    """Addresses of the layers of tensors, one address per tensor for a layer. Layers of a tensor must have equal
    strides. Made once per step, so that a layer needs no work per sequence."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """The first dimension of each tensor is its layers."""
        self._first_B = addresses(tensors)
        self._distance_B = torch.tensor([each.stride(0) * each.element_size() for each in tensors])

    def of(self, layer: int) -> Tensor:
        """Return the addresses of a layer, int64."""
        return self._first_B + layer * self._distance_B


def addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors' addresses, int64."""
    return torch.tensor([each.data_ptr() for each in tensors])
