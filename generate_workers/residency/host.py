"""Residency `host`: all KV lives in host memory; a step fetches each layer whole, one layer ahead.

A Residency for `engine.step_runner`, after FlexGen (Sheng et al., 2023), with what its published baselines lack: home
memory that is pinned on CUDA, and a double buffer, so that layer l computes while layer l + 1 is being fetched. The
device holds two layers of every row, however long the model: a slot has an area for the even layers, and one for the
odd layers. Only layer 0's fetch is not hidden behind computing.

    engine:  begin 0 | layer 0 | end 0 | begin 1 | layer 1 | end 1 | begin 2 ...
    link:    fetch 0 | fetch 1 ------- |         | fetch 2 ------- |

A step fetches L x rows x tokens x row bytes, the tokens being those cached before it, and stores the new ones.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from baton.ids import SlotId
from baton.types import KvLayout, TokenRange
from generate_workers.residency.host_link import HostLink
from generate_workers.residency.paged_row import MakeMemory, PagedRow
from generate_workers.residency.port import KvBytes, KvShape, StepRows
from generate_workers.residency.traits import POLICIES
from modeling.forward.decoder import SequenceSpan
from modeling.forward.selection import Picks
from modeling.kv.buffers import BufferSpan, KvBuffer, KvPlace, KvRows
from modeling.kv.memory import RowMemory

_NUM_AREAS = 2


class HostRow(PagedRow):
    """A RowKv with home memory for all layers, and on the device an area for two."""

    def __init__(self, layout: KvLayout, home: RowMemory, area: RowMemory) -> None:
        super().__init__(layout, home)
        self.area_memory = area
        self._area_layout = replace(layout, num_layers=_NUM_AREAS)
        self._area: KvBuffer | None = None

    @property
    def area(self) -> KvBuffer:
        """Return the row's memory on the device, in which layer l has number l modulo 2."""
        assert self._area is not None, "the slot is not claimed"
        return self._area

    @property
    def num_bytes(self) -> KvBytes:
        """Return the committed bytes of home and area."""
        return KvBytes(self.memory.num_bytes, self.area_memory.num_bytes)

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin a claim; the area's pages come with its first step. When it fails, nothing is held."""
        super().open(num_tokens, capacity_tokens)
        try:
            self.area_memory.expect(num_tokens)
        except BaseException:
            self.release()
            raise
        data = self.area_memory.data_LS2GH[:, :capacity_tokens]
        self._area = KvBuffer.of(self._area_layout, TokenRange(0, capacity_tokens), data)

    def release(self) -> None:
        """End the claim, if there is one."""
        super().release()
        self._area = None
        self.area_memory.release()


@dataclass(frozen=True)
class AreaSpan:
    """A SequenceSpan whose KV is present for two layers at a time."""

    inner: BufferSpan

    @property
    def tokens(self) -> TokenRange:
        return self.inner.tokens

    def own(self, layer: int) -> Tensor:
        return self.inner.own(layer % _NUM_AREAS)

    def segments(self, layer: int) -> Iterator[KvRows]:
        return self.inner.segments(layer % _NUM_AREAS)

    def place(self) -> KvPlace:
        return self.inner.place()


class HostStep:
    """A StepKv that fetches one layer ahead, and stores the new tokens' KV."""

    def __init__(
        self, num_layers: int, rows: Sequence[tuple[HostRow, TokenRange]], link: HostLink, bytes_read: int
    ) -> None:
        self.spans: Sequence[SequenceSpan] = [AreaSpan(BufferSpan(row.area, tokens)) for row, tokens in rows]
        self.num_bytes_read = bytes_read
        self._num_layers = num_layers
        self._rows = rows
        self._link = link
        self._fetch = self._begin_fetch(0)

    @property
    def turns(self) -> "HostStep":
        """Return this step, which takes the turns itself."""
        return self

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Wait for the layer, then begin to fetch the next; its area was left by the layer before this one."""
        self._fetch.result()
        if layer + 1 < self._num_layers:
            self._fetch = self._begin_fetch(layer + 1)

    def picks(self, layer: int, q_TNH: Tensor) -> Picks | None:
        """Return None: rows attend to all keys."""
        return None

    def end(self, layer: int) -> None:
        """Store the new tokens' KV of the layer at home."""
        area = layer % _NUM_AREAS
        self._link.store([(row.buffer.span(layer, new), row.area.span(area, new)) for row, new in self._rows])

    def settle(self) -> None:
        """Return when no fetch is running. A fetch's error is raised by `begin`, not here."""
        wait([self._fetch])

    def _begin_fetch(self, layer: int) -> "Future[None]":
        area = layer % _NUM_AREAS
        cached = [(row, TokenRange(0, new.start)) for row, new in self._rows if new.start]
        return self._link.fetch([(row.area.span(area, old), row.buffer.span(layer, old)) for row, old in cached])


class HostResidency:
    """A Residency that keeps all KV in host memory."""

    traits = POLICIES["host"]

    def __init__(self, shape: KvShape, make_home: MakeMemory, make_area: MakeMemory, link: HostLink) -> None:
        """Own `link` from now on. Raises what is in OUT_OF_MEMORY when the slots' address space cannot be had."""
        layout = shape.layout
        areas = replace(layout, num_layers=_NUM_AREAS)
        most = shape.max_slot_tokens
        self._shape = shape
        self._link = link
        self._rows = [HostRow(layout, make_home(layout, most), make_area(areas, most)) for _ in range(shape.num_slots)]

    @property
    def num_link_bytes(self) -> int:
        """Return the bytes copied so far, in both directions."""
        return self._link.num_bytes_fetched + self._link.num_bytes_stored

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """Return the bytes of all layers at home, and of two layers on the device."""
        row = self._rows[0]
        return KvBytes(row.memory.bytes_for(num_tokens), row.area_memory.bytes_for(num_tokens))

    def open(self, slot: SlotId, num_tokens: int, capacity_tokens: int) -> HostRow:
        """Begin a claim; pushed KV is written to home memory."""
        self._rows[slot].open(num_tokens, capacity_tokens)
        return self._rows[slot]

    def copy(self, source: SlotId, target: SlotId, num_tokens: int) -> None:
        """Copy tokens between two slots within home memory."""
        self._rows[target].copy_from(self._rows[source], num_tokens)

    @contextmanager
    def step(self, rows: StepRows) -> Iterator[HostStep]:
        """Commit the new tokens, begin to fetch layer 0, and yield spans over the areas."""
        for slot, tokens in rows:
            self._rows[slot].memory.commit(tokens)
            self._rows[slot].area_memory.commit(TokenRange(0, tokens.end))
        bytes_read = self._shape.bytes_read(tokens for _, tokens in rows)
        step = HostStep(
            self._shape.layout.num_layers, [(self._rows[slot], new) for slot, new in rows], self._link, bytes_read
        )
        try:
            yield step
        finally:
            step.settle()

    def close(self) -> None:
        """End the link's thread."""
        self._link.close()
