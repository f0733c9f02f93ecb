"""Residency `host`: all KV lives in host memory; a step fetches each layer whole, one layer ahead.

A Residency for `engine.step_runner`, after FlexGen (Sheng et al., 2023), with what its published baselines lack: home
memory that is pinned on CUDA, and a double buffer, so that layer l computes while layer l + 1 is being fetched. The
device holds two layers of every row, however long the model: a slot has an area for the even layers, and one for the
odd layers. Only layer 0's fetch is not hidden behind computing.

    engine:  begin 0 | layer 0 | end 0 | begin 1 | layer 1 | end 1 | begin 2 ...
    link:    fetch 0 | fetch 1 ------- |         | fetch 2 ------- |

A step fetches L x rows x tokens x row bytes, the tokens being those cached before it, and stores the new ones. Every
copy goes over the device's link (`modeling.device`), which counts it: fetches in the order in which they were asked
for, while the engine's thread computes. No other thread touches memory of a copy until it is done. Where the device is
the CPU, the link is memory bandwidth.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from baton.ids import SlotId
from baton.types import TokenRange
from generate_workers.residency.beside import Beside, BesideSpan
from generate_workers.residency.port import KvShape, StepRows
from generate_workers.residency.rows import Area, AreaRow, PagedKv
from generate_workers.residency.steps import RowResidency, RowStep
from generate_workers.residency.traits import POLICIES
from modeling.device.port import Copies, Device, Link, num_bytes_of
from modeling.kv.transfers import Transfer

_NUM_AREAS = 2


class HostRow(AreaRow):
    """A StoredRow with home memory for all layers, and an area for two on the device: layer l has number l modulo 2."""

    def __init__(self, kv: PagedKv, area: Area, beside: Beside | None = None) -> None:
        super().__init__([kv], [area] if beside is None else [area, beside])
        self.home, self.area, self.beside = kv, area, beside


class HostStep(RowStep[HostRow]):
    """A StepKv that fetches one layer ahead, and stores the new tokens' KV."""

    def __init__(self, shape: KvShape, rows: Sequence[tuple[HostRow, TokenRange]], link: Link) -> None:
        super().__init__(rows, shape.bytes_read(tokens for _, tokens in rows))
        self._num_layers = shape.layout.num_layers
        self._buffers = [(row.home.buffer, row.area.buffer, new) for row, new in rows]
        self._link = link
        self._stores: list[Transfer] = []
        """Those of the layers that have run."""
        self._fetch = self._begin_fetch(0)

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Wait for the layer, then begin to fetch the next; its area was left by the layer before this one."""
        self._fetch.join()
        if layer >= _NUM_AREAS:
            self._stores[layer - _NUM_AREAS].join()  # from where this layer's new tokens are to be
        if layer + 1 < self._num_layers:
            self._fetch = self._begin_fetch(layer + 1)

    def end(self, layer: int) -> None:
        """Begin to store the new tokens' KV of the layer at home."""
        area = layer % _NUM_AREAS
        copies = [(home.span(layer, new), there.span(area, new)) for home, there, new in self._buffers]
        self.num_link_bytes += num_bytes_of(copies)
        self._stores.append(self._link.store(copies))

    def settle(self) -> None:
        """Wait until all new KV is at home."""
        for store in self._stores:
            store.result()

    def leave(self) -> None:
        """Return when nothing is being copied. A fetch's error is raised by `begin`, not here."""
        for transfer in (self._fetch, *self._stores):
            transfer.wait()

    def _begin_fetch(self, layer: int) -> Transfer:
        area = layer % _NUM_AREAS
        cached = [(home, there, TokenRange(0, new.start)) for home, there, new in self._buffers if new.start]
        copies = [(there.span(area, old), home.span(layer, old)) for home, there, old in cached]
        self.num_link_bytes += num_bytes_of(copies)
        return self._link.fetch(copies)


class HostResidency(RowResidency[HostRow]):
    """A Residency that keeps all KV in host memory."""

    traits = POLICIES["host"]

    def __init__(self, shape: KvShape, device: Device) -> None:
        """Raise what is in OUT_OF_MEMORY when the slots' address space cannot be had."""
        layout, most = shape.layout, shape.max_slot_tokens
        areas, drafts = replace(layout, num_layers=_NUM_AREAS), shape.draft_keys
        rows = [
            HostRow(
                PagedKv(layout, device.home_memory, most),
                Area(areas, device.row_memory, most),
                None if drafts is None else Beside(layout, device.row_memory, drafts),
            )
            for _ in range(shape.num_slots)
        ]
        self._link = device.link
        super().__init__(rows, lambda rows: HostStep(shape, rows, device.link))

    def draft_spans(self, rows: StepRows) -> list[BesideSpan]:
        """Return spans of one new token each over the copies of their rows."""
        return [self._besides(slot).span(tokens) for slot, tokens in rows]

    def follow(self, rows: Iterable[tuple[SlotId, int]]) -> None:
        """Copy to the device what drafts attend to of the rows' first so many tokens, as far as it is not there."""

        def fetch(copies: Copies) -> None:
            self.num_link_bytes += num_bytes_of(copies)
            self._link.fetch(copies).join()

        for slot, num_tokens in rows:
            self._besides(slot).follow(self._rows[slot].home.buffer, num_tokens, fetch)

    def _besides(self, slot: SlotId) -> Beside:
        beside = self._rows[slot].beside
        assert beside is not None, "the policy was made without drafts"
        return beside

    def close(self) -> None:
        """End the link's threads."""
        self._link.rest()
