"""Residency `host`: all KV is stored in host memory. A step fetches the KV of each layer, one layer ahead of its use.

A Residency for `engine.model_runner`, after FlexGen (Sheng et al., 2023). Unlike FlexGen's published baselines, it pins
host memory on CUDA, and uses a double buffer, so that layer l computes while layer l + 1 is fetched. The device holds
two layers of each sequence, for a model of any depth: a slot has one area (memory for one layer's KV) for even layers
and one for odd layers. Only the fetch of layer 0 does not overlap with computing.

    engine:  begin 0 | layer 0 | end 0 | begin 1 | layer 1 | end 1 | begin 2 ...
    link:    fetch 0 | fetch 1 ------- |         | fetch 2 ------- |

A step fetches the KV of all tokens cached before it, in all layers, and stores the KV of its new tokens. Every copy
uses the device's link (`baton.modeling.device`), which counts it. Fetches run in the order of their requests, while the
engine's thread computes. No other thread uses the memory of a copy until it is done. If the device is the CPU, the link
is memory bandwidth.
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
    """StoredRow with host memory for all layers, and an Area of two layers on the device. Layer l uses layer l % 2 of
    the Area."""

    def __init__(self, kv: PagedKv, area: Area, draft_window: DraftWindow | None = None) -> None:
        super().__init__([kv], [area] if draft_window is None else [area, draft_window])
        self.home, self.area, self.draft_window = kv, area, draft_window


class HostStep(RowStep[HostRow]):
    """StepKv that fetches one layer ahead, and stores the new tokens' KV."""

    def __init__(self, shape: KvShape, rows: Sequence[tuple[HostRow, TokenRange]], link: Link) -> None:
        super().__init__(rows, shape.bytes_read(tokens for _, tokens in rows))
        self._num_layers = shape.layout.num_layers
        self._buffers = [(row.home.buffer, row.area.buffer, new) for row, new in rows]
        self._link = link
        self._stores: list[Transfer] = []
        """Transfers of the layers that have run, by layer."""
        self._fetch = self._begin_fetch(0)

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Wait for the layer's fetch, and begin to fetch layer + 1 into the area of layer - 1, which is not used any
        more."""
        self._fetch.join()
        if layer >= _NUM_AREAS:
            self._stores[layer - _NUM_AREAS].join()  # its copy reads the memory of this layer's new tokens
        if layer + 1 < self._num_layers:
            self._fetch = self._begin_fetch(layer + 1)

    def end(self, layer: int) -> None:
        """Begin to store the layer's new KV in host memory."""
        area = layer % _NUM_AREAS
        copies = [(home.span(layer, new), there.span(area, new)) for home, there, new in self._buffers]
        self.num_link_bytes += num_bytes_of(copies)
        self._stores.append(self._link.store(copies))

    def settle(self) -> None:
        """Wait until all new KV is in host memory."""
        for store in self._stores:
            store.result()

    def leave(self) -> None:
        """Wait until no copy runs. Errors of fetches are not raised here, but by `begin`."""
        for transfer in (self._fetch, *self._stores):
            transfer.wait()

    def _begin_fetch(self, layer: int) -> Transfer:
        area = layer % _NUM_AREAS
        cached = [(home, there, TokenRange(0, new.start)) for home, there, new in self._buffers if new.start]
        copies = [(there.span(area, old), home.span(layer, old)) for home, there, old in cached]
        self.num_link_bytes += num_bytes_of(copies)
        return self._link.fetch(copies)


class HostResidency(RowResidency[HostRow]):
    """Residency that keeps all KV in host memory."""

    traits = POLICIES["host"]

    def __init__(self, shape: KvShape, device: Device) -> None:
        """Raises an error of OUT_OF_MEMORY if the slots' address space cannot be reserved."""
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
        """Return spans of one new token each over the sequences' copies on the device."""
        return [self._window_of(slot).span(tokens) for slot, tokens in rows]

    def follow(self, rows: Iterable[tuple[SlotId, int]]) -> None:
        """Copy KV to the device that drafts attend to and that is missing there. `rows`: slots, each with its number of
        tokens whose KV is final. Blocks until the copies are complete."""

        def fetch(copies: Copies) -> None:
            self.num_link_bytes += num_bytes_of(copies)
            self._link.fetch(copies).join()

        for slot, num_tokens in rows:
            self._window_of(slot).follow(self._rows[slot].home.buffer, num_tokens, fetch)

    def _window_of(self, slot: SlotId) -> DraftWindow:
        draft_window = self._rows[slot].draft_window
        assert draft_window is not None, "the policy was made without drafts"
        return draft_window

    def close(self) -> None:
        """End the link's threads."""
        self._link.rest()
