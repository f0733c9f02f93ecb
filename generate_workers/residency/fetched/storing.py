"""New tokens' KV on its way home, beside a step's computing, for policies whose KV lives at home (`rows`).

T tokens, G kv heads, H head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from modeling.device.copying import RowCopies, ThreadLink
from modeling.device.port import Device, Transfer


class HomeStores:
    """What one step stores. Engine's thread."""

    def __init__(self, link: ThreadLink) -> None:
        self._link = link
        self._transfers: dict[int, Transfer] = {}
        """What is being stored of rows of one new token, by layer."""
        self.num_bytes = 0
        """Bytes that were asked for so far."""

    def begin(self, layer: int, there: Sequence[Tensor], home: Sequence[Tensor]) -> None:
        """Begin to store a layer's new tokens, one of each row, all of one size."""
        copies = RowCopies(addresses(there), addresses(home), there[0].nbytes)
        self.num_bytes += copies.num_bytes
        self._transfers[layer] = self._link.store_rows(copies)

    def store(self, home: Tensor, there: Tensor) -> None:
        """Store contiguous KV; return when it is at home, so that its memory may be taken."""
        self.num_bytes += there.nbytes
        self._link.store([(home, there)]).result()

    def join(self, layer: int) -> None:
        """Wait until a layer's new tokens may be overwritten on the device, if any were stored."""
        if (transfer := self._transfers.get(layer)) is not None:
            transfer.join()

    def settle(self) -> None:
        """Wait until all is at home; raise what went wrong."""
        for transfer in self._transfers.values():
            transfer.result()

    def wait(self) -> None:
        """Wait until nothing is being copied, even if it failed."""
        for transfer in self._transfers.values():
            transfer.wait()


def link_of(device: Device) -> ThreadLink:
    """Return the link of a device whose copies threads of the host make."""
    assert isinstance(device.link, ThreadLink)
    return device.link


def addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors' addresses, int64."""
    return torch.tensor([each.data_ptr() for each in tensors])
