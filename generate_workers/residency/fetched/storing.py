"""Copies the KV of new tokens from the device to host memory while a step computes. Used by policies that store KV in
host memory (`rows`).

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
    """Copies of one step's new KV from the device to host memory, which is called `home` in names. Used on the engine's
    thread."""

    def __init__(self, link: HeadLink) -> None:
        self._link = link
        self._transfers: dict[int, Transfer] = {}
        """Copies that have begun, for sequences with one new token. The key is the layer."""
        self._longer: list[Transfer] = []
        """Copies that have begun, for sequences with several new tokens."""
        self.num_bytes = 0
        """Number of bytes of all copies that have begun so far."""

    def begin(self, layer: int, there: Sequence[Tensor], home: Sequence[Tensor]) -> None:
        """Begin to copy the KV of a layer's new tokens, one token per sequence, from `there`, on the device, to `home`,
        in host memory. All copies must have the same size."""
        self.begin_rows(layer, RowCopies(addresses(there), addresses(home), there[0].nbytes))

    def begin_rows(self, layer: int, copies: RowCopies) -> None:
        """Begin `copies`, which store the KV of a layer's new tokens, one token per sequence."""
        self.num_bytes += copies.num_bytes
        self._transfers[layer] = self._link.store_rows(copies)

    def store(self, home: Tensor, there: Tensor) -> None:
        """Copy contiguous KV from `there`, on the device, to `home`, in host memory. Return when the device memory may
        be reused."""
        self.num_bytes += there.nbytes
        self._longer.append(self._link.store([(home, there)]))
        self._longer[-1].join()

    def join(self, layer: int) -> None:
        """Wait until the copy of the KV of a layer's new tokens has ended, so that the tokens' device memory may be
        overwritten. Return at once if no copy was begun for the layer. Does not wait for copies of sequences with
        several new tokens."""
        if (transfer := self._transfers.get(layer)) is not None:
            transfer.join()

    def settle(self) -> None:
        """Wait until all KV is in host memory. Raises the error of a failed copy."""
        for transfer in (*self._transfers.values(), *self._longer):
            transfer.result()

    def wait(self) -> None:
        """Wait until all copies have ended. Does not raise the errors of failed copies."""
        for transfer in (*self._transfers.values(), *self._longer):
            transfer.wait()


def link_of(device: Device) -> HeadLink:
    """Return the device's link, which copies between host and device memory. The device must have its own memory."""
    assert hasattr(device.link, "fetch_heads"), f"the link of {device.name} does not copy by address"
    return cast(HeadLink, device.link)


class LayerAddresses:
    """Memory addresses of several tensors, layer by layer. The layers of a tensor must have equal strides. The object
    is made once per step. It then returns the addresses of a layer in all tensors without a loop over sequences."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Compute the address of every layer in `tensors`. The first dimension of each tensor must be the layer."""
        self._first_B = addresses(tensors)
        self._distance_B = torch.tensor([each.stride(0) * each.element_size() for each in tensors])

    def of(self, layer: int) -> Tensor:
        """Return the addresses of a layer in all tensors, int64, one entry per tensor."""
        return self._first_B + layer * self._distance_B


def addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Return the address of each tensor's data as an int64 tensor, one entry per tensor."""
    return torch.tensor([each.data_ptr() for each in tensors])
