"""Residency `host`: all KV is stored in host memory. A step fetches the KV of each layer to the device, one layer
before it is used.

A Residency for `engine.model_runner`, after FlexGen (Sheng et al., 2023). Unlike FlexGen's published baselines, it pins
host memory on CUDA, and uses a double buffer: layer l computes while layer l + 1 is fetched. The device holds the KV of
two layers of each sequence, for a model of any depth. A slot has two areas (memory for one layer's KV): one for even
layers and one for odd layers. Only the fetch of layer 0 does not overlap with computing.

    engine:  begin 0 | layer 0 | end 0 | begin 1 | layer 1 | end 1 | begin 2 ...
    link:    fetch 0 | fetch 1 ------- |         | fetch 2 ------- |

In each layer, a step fetches the KV of the tokens that were cached before the step, and stores the KV of its new
tokens. Every copy uses the device's link (`baton.modeling.device`), which counts the copied bytes. Fetches run in the
order in which they were requested, while the engine's thread computes. No other thread uses the memory of a copy until
the copy has ended. If the device is the CPU, a copy over the link is a copy within host memory.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from baton.modeling.device.port import Copies, Device, Link, num_bytes_of
from baton.modeling.kv.transfers import Transfer
from baton.types import SlotId, TokenRange
from generate_workers.residency.draft_window import DraftWindow, DraftWindowSpan
from generate_workers.residency.port import KvShape, StepRows
from generate_workers.residency.row_parts import Area, AreaRow, PagedKv
from generate_workers.residency.steps import RowResidency, RowStep
from generate_workers.residency.traits import POLICIES

_NUM_AREAS = 2


class HostRow(AreaRow):
    """Memory of one slot (a StoredRow): host memory for the KV of all layers, and one Area object (device memory) for
    the KV of two layers at a time. Model layer l uses layer index l % 2 of this object."""

    def __init__(self, kv: PagedKv, area: Area, draft_window: DraftWindow | None = None) -> None:
        super().__init__([kv], [area] if draft_window is None else [area, draft_window])
        self.home, self.area, self.draft_window = kv, area, draft_window


class HostStep(RowStep[HostRow]):
    """Step that fetches each layer's KV one layer ahead, and copies the new tokens' KV to host memory."""

    def __init__(self, shape: KvShape, rows: Sequence[tuple[HostRow, TokenRange]], link: Link) -> None:
        super().__init__(rows, shape.bytes_read(tokens for _, tokens in rows))
        self._num_layers = shape.layout.num_layers
        self._buffers = [(row.home.buffer, row.area.buffer, new) for row, new in rows]
        self._link = link
        self._stores: list[Transfer] = []
        """Copies of new tokens' KV to host memory, one for each layer that has run, in the order of layers."""
        self._fetch = self._begin_fetch(0)

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Wait for the fetch of the KV of `layer`. Then begin to fetch the KV of layer `layer` + 1, into the memory
        that layer `layer` - 1 used."""
        self._fetch.join()
        if layer >= _NUM_AREAS:
            self._stores[layer - _NUM_AREAS].join()  # its copy reads the memory of this layer's new tokens
        if layer + 1 < self._num_layers:
            self._fetch = self._begin_fetch(layer + 1)

    def end(self, layer: int) -> None:
        """Begin to copy the new tokens' KV of `layer` to host memory."""
        area = layer % _NUM_AREAS
        copies = [(home.span(layer, new), there.span(area, new)) for home, there, new in self._buffers]
        self.num_link_bytes += num_bytes_of(copies)
        self._stores.append(self._link.store(copies))

    def settle(self) -> None:
        """Wait until the new tokens' KV is in host memory. Raises the error of a failed copy."""
        for store in self._stores:
            store.result()

    def leave(self) -> None:
        """Wait until all fetches and stores of the step have ended. Does not raise their errors: `begin` raises the
        errors of fetches, and `settle` those of stores."""
        for transfer in (self._fetch, *self._stores):
            transfer.wait()

    def _begin_fetch(self, layer: int) -> Transfer:
        area = layer % _NUM_AREAS
        cached = [(home, there, TokenRange(0, new.start)) for home, there, new in self._buffers if new.start]
        copies = [(there.span(area, old), home.span(layer, old)) for home, there, old in cached]
        self.num_link_bytes += num_bytes_of(copies)
        # Queued kernels may still use the area for an earlier layer.
        return self._link.fetch(copies, after=self._link.queued())


class HostResidency(RowResidency[HostRow]):
    """Residency that stores all KV in host memory, and fetches each layer's KV to the device in every step."""

    traits = POLICIES["host"]

    def __init__(self, shape: KvShape, device: Device) -> None:
        """Make the memory of all slots. Raises an error of OUT_OF_MEMORY if the slots' address space cannot be
        reserved."""
        layout, most = shape.layout, shape.max_slot_tokens
        areas, drafts = replace(layout, num_layers=_NUM_AREAS), shape.draft_keys
        rows = [
            HostRow(
                PagedKv(layout, device.home_memory, most),
                Area(areas, device.row_memory, most),
                None if drafts is None else DraftWindow(layout, device.row_memory, drafts),
            )
            for _ in range(shape.num_slots)
        ]
        self._link = device.link
        super().__init__(rows, lambda rows: HostStep(shape, rows, device.link))

    def draft_spans(self, rows: StepRows) -> list[DraftWindowSpan]:
        """Return the spans of a draft step with one new token per sequence. Each span contains the sequence's first and
        latest KV, copied to the device."""
        return [self._window_of(slot).span(tokens) for slot, tokens in rows]

    def follow(self, rows: Iterable[tuple[SlotId, int]]) -> None:
        """Copy KV that drafts attend to from host memory to the device, unless it is on the device already. `rows`:
        slots, each with its number of tokens whose KV is final. Blocks until the copies have ended."""

        def fetch(copies: Copies) -> None:
            self.num_link_bytes += num_bytes_of(copies)
            self._link.fetch(copies, after=self._link.queued()).join()

        for slot, num_tokens in rows:
            self._window_of(slot).follow(self._rows[slot].home.buffer, num_tokens, fetch)

    def _window_of(self, slot: SlotId) -> DraftWindow:
        draft_window = self._rows[slot].draft_window
        assert draft_window is not None, "the policy was made without drafts"
        return draft_window

    def close(self) -> None:
        """Stop the threads that copy data over the link between host and device."""
        self._link.rest()
