"""Residency `host`: all KV lives in host memory; a step fetches each layer whole, one layer ahead.

A Residency for `engine.step_runner`, after FlexGen (Sheng et al., 2023), with what its published baselines lack: home
memory that is pinned on CUDA, and a double buffer, so that layer l computes while layer l + 1 is being fetched. The
device holds two layers of every row, however long the model: a slot has an area for the even layers, and one for the
odd layers. Only layer 0's fetch is not hidden behind computing.

    engine:  begin 0 | layer 0 | end 0 | begin 1 | layer 1 | end 1 | begin 2 ...
    link:    fetch 0 | fetch 1 ------- |         | fetch 2 ------- |

A step fetches L x rows x tokens x row bytes, the tokens being those cached before it, and stores the new ones. Every
copy goes through a HostLink, which counts it. Fetches run on the link's own thread, in the order in which they were
asked for, while the engine's thread computes; no other thread touches memory of a copy until it is done. Where the
device is the CPU, the link is memory bandwidth.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from baton.ids import SlotId
from baton.types import TokenRange
from generate_workers.residency.beside import Beside, BesideSpan
from generate_workers.residency.port import KvShape, StepRows
from generate_workers.residency.rows import Area, AreaRow, MakeMemory, PagedKv
from generate_workers.residency.steps import RowResidency, RowStep
from generate_workers.residency.traits import POLICIES
from modeling.kv.buffers import byte_view

_NUM_AREAS = 2
Copies = Sequence[tuple[Tensor, Tensor]]
"""Pairs `(to, from)`, contiguous and of equal shape and dtype."""
CopyTensor = Callable[[Tensor, Tensor], None]
"""Copies `(to, from)`, and returns when the copy is done."""


def copy_tensor(to: Tensor, source: Tensor) -> None:
    """Copy a tensor, and return when the copy is done. On the CPU on one core and without the GIL: torch would take the
    cores that compute. On CUDA in the default stream, behind the kernels that still read what is overwritten: correct,
    but not concurrent with them."""
    if to.device.type == source.device.type == "cpu":
        np.copyto(np.asarray(byte_view(to)), np.asarray(byte_view(source)))
    else:
        to.copy_(source, non_blocking=True)
        torch.cuda.current_stream().synchronize()


class HostLink:
    """Copies in one direction at a time, first come, first served. One thread calls `fetch` and `store`."""

    def __init__(self, copy: CopyTensor = copy_tensor) -> None:
        """`copy` is the function that copies one tensor."""
        self._copy = copy
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-link")
        self._num_bytes_fetched = self._num_bytes_stored = 0  # each counted by one thread

    @property
    def num_bytes(self) -> int:
        """Return the bytes of finished copies, in both directions."""
        return self._num_bytes_fetched + self._num_bytes_stored

    def fetch(self, copies: Copies) -> "Future[None]":
        """Begin to copy from home to the device. The future is done when all is copied, and raises what went wrong."""
        return self._thread.submit(self._fetch, copies)

    def store(self, copies: Copies) -> None:
        """Copy from the device home, and return when that is done."""
        for to, source in copies:
            self._copy(to, source)
            self._num_bytes_stored += source.nbytes

    def close(self) -> None:
        """Wait for the copies that were asked for, and end the thread. Idempotent."""
        self._thread.shutdown()

    def _fetch(self, copies: Copies) -> None:
        for to, source in copies:
            self._copy(to, source)
            self._num_bytes_fetched += source.nbytes


class HostRow(AreaRow):
    """A StoredRow with home memory for all layers, and an area for two on the device: layer l has number l modulo 2."""

    def __init__(self, kv: PagedKv, area: Area, beside: Beside | None = None) -> None:
        super().__init__([kv], [area] if beside is None else [area, beside])
        self.home, self.area, self.beside = kv, area, beside


class HostStep(RowStep[HostRow]):
    """A StepKv that fetches one layer ahead, and stores the new tokens' KV."""

    def __init__(self, shape: KvShape, rows: Sequence[tuple[HostRow, TokenRange]], link: HostLink) -> None:
        super().__init__(rows, shape.bytes_read(tokens for _, tokens in rows))
        self._num_layers = shape.layout.num_layers
        self._buffers = [(row.home.buffer, row.area.buffer, new) for row, new in rows]
        self._link = link
        self._num_bytes_before = link.num_bytes
        self._fetch = self._begin_fetch(0)

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Wait for the layer, then begin to fetch the next; its area was left by the layer before this one."""
        self._fetch.result()
        if layer + 1 < self._num_layers:
            self._fetch = self._begin_fetch(layer + 1)

    def end(self, layer: int) -> None:
        """Store the new tokens' KV of the layer at home."""
        area = layer % _NUM_AREAS
        self._link.store([(home.span(layer, new), there.span(area, new)) for home, there, new in self._buffers])

    def leave(self) -> None:
        """Return when no fetch is running. A fetch's error is raised by `begin`, not here."""
        wait([self._fetch])
        self.num_link_bytes = self._link.num_bytes - self._num_bytes_before

    def _begin_fetch(self, layer: int) -> "Future[None]":
        area = layer % _NUM_AREAS
        cached = [(home, there, TokenRange(0, new.start)) for home, there, new in self._buffers if new.start]
        return self._link.fetch([(there.span(area, old), home.span(layer, old)) for home, there, old in cached])


class HostResidency(RowResidency[HostRow]):
    """A Residency that keeps all KV in host memory."""

    traits = POLICIES["host"]

    def __init__(self, shape: KvShape, make_home: MakeMemory, make_area: MakeMemory, link: HostLink) -> None:
        """Own `link` from now on. Raises what is in OUT_OF_MEMORY when the slots' address space cannot be had."""
        layout, most = shape.layout, shape.max_slot_tokens
        areas, drafts = replace(layout, num_layers=_NUM_AREAS), shape.draft_keys
        rows = [
            HostRow(
                PagedKv(layout, make_home, most),
                Area(areas, make_area, most),
                None if drafts is None else Beside(layout, make_area, drafts),
            )
            for _ in range(shape.num_slots)
        ]
        super().__init__(rows, lambda rows: HostStep(shape, rows, link))
        self._link = link

    def draft_spans(self, rows: StepRows) -> list[BesideSpan]:
        """Return spans of one new token each over the copies of their rows."""
        return [self._besides(slot).span(tokens) for slot, tokens in rows]

    def follow(self, rows: Iterable[tuple[SlotId, int]]) -> None:
        """Copy to the device what drafts attend to of the rows' first so many tokens, as far as it is not there."""

        def fetch(copies: Copies) -> None:
            self._link.fetch(copies).result()

        num_bytes = self._link.num_bytes
        for slot, num_tokens in rows:
            self._besides(slot).follow(self._rows[slot].home.buffer, num_tokens, fetch)
        self.num_link_bytes += self._link.num_bytes - num_bytes

    def _besides(self, slot: SlotId) -> Beside:
        beside = self._rows[slot].beside
        assert beside is not None, "the policy was made without drafts"
        return beside

    def close(self) -> None:
        """End the link's thread."""
        self._link.close()
