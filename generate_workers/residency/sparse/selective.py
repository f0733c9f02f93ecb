"""Common base of policies that attend to some keys: home memory, layers that stay whole, and what is read.

Its subclasses are Residencies for `engine.step_runner`. Home holds all KV, as `device` does; on a CPU attention reads
the chosen rows where they lie. The first two layers attend to all keys, because what matters there cannot be told early
(InfiniGen; Lee et al., 2024), and count as the device's: a device beside host memory would hold them, the policy's
index for choosing keys, and the rows being fetched. So

    home    all KV, to the page
    device  the first two layers' KV, and the policy's index
    link    in the other layers, the rows that are attended to: 2 x H elements for each kv head's pick

Rows of one new token choose, even if it is a prompt's last; longer spans (local prefill) attend to all keys. What one
row chooses depends on no other row.

B rows of one new token, T tokens of all rows, N heads, G kv heads, H head dim.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from baton.errors import ConfigError
from baton.ids import SlotId
from baton.types import KvLayout, TokenRange
from generate_workers.residency.paged_row import MakeMemory, PagedRow
from generate_workers.residency.port import KvBytes, KvShape, RowKv, StepRows
from generate_workers.residency.traits import PolicyTraits
from modeling.forward.decoder import SequenceSpan
from modeling.forward.rows import has_native_rows
from modeling.forward.selection import Picks
from modeling.kv.buffers import TORCH_DTYPES, BufferSpan
from modeling.sparse.bases import NUM_WHOLE_LAYERS


def require_selective(name: str, shape: KvShape, device: torch.device) -> None:
    """Raise ConfigError where no policy can attend to some of the keys; `name` is the policy that was asked for."""
    where = f"residency = {name!r} is not there"
    layout = shape.layout
    if device.type != "cpu":
        raise ConfigError(f"{where} on device {device.type}: use residency device or host, or device cpu")
    if any(window is not None for window in shape.windows):
        raise ConfigError(f"{where} for models with sliding windows: use residency device or host")
    if not has_native_rows(device, TORCH_DTYPES[layout.dtype], layout.head_dim):
        kernels = f"kernels in C++ for {layout.dtype} and head dim {layout.head_dim}"
        raise ConfigError(f"{where} without {kernels}: install a C++ compiler, or use residency device or host")


class HomeRow(RowKv, Protocol):
    """A row whose KV lies at home, where attention reads the chosen keys."""

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """Return the bytes that so many tokens take once all are written."""
        ...

    def num_kept(self, num_tokens: int) -> int:
        """Return the keys left in a layer that chooses, after so many tokens came, while no step runs."""
        ...

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin a claim; `num_tokens` tokens will be written for sure."""
        ...

    def commit(self, tokens: TokenRange) -> None:
        """Commit memory for `tokens`, which a step is about to write."""
        ...

    def span(self, tokens: TokenRange) -> SequenceSpan:
        """Return the span of a step whose new tokens are `tokens`."""
        ...

    def copy_from(self, other: Self, num_tokens: int) -> None:
        """Copy another row's first `num_tokens` tokens."""
        ...


class SelectiveRow(PagedRow):
    """A HomeRow with home memory for all layers."""

    def __init__(self, shape: KvShape, make_memory: MakeMemory) -> None:
        """Raise what is in OUT_OF_MEMORY when the slot's address space cannot be had."""
        layout, most = shape.layout, shape.max_slot_tokens
        super().__init__(layout, make_memory(layout, most))
        self._num_whole = min(NUM_WHOLE_LAYERS, layout.num_layers)
        self._whole = make_memory(replace(layout, num_layers=self._num_whole), most)
        """Counts the pages of the layers that stay whole: on a CPU their KV lies in home memory, and nothing is written
        here."""

    @property
    def num_bytes(self) -> KvBytes:
        """Return the bytes of all layers at home; on the device those of the whole layers, and of the index."""
        return KvBytes(self.memory.num_bytes, self._whole.num_bytes + self.index_bytes)

    @property
    def index_bytes(self) -> int:
        """Return the bytes now committed for the index, which is what the policy keeps to choose keys by."""
        return 0

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """Return the bytes that so many tokens take once all are written."""
        on_device = self._whole.bytes_for(num_tokens) + self.index_bytes_for(num_tokens)
        return KvBytes(self.memory.bytes_for(num_tokens), on_device)

    def index_bytes_for(self, num_tokens: int) -> int:
        """Return the bytes of the index that chooses among so many tokens."""
        return 0

    def num_kept(self, num_tokens: int) -> int:
        """Return `num_tokens`: all keys are kept."""
        return num_tokens

    def span(self, tokens: TokenRange) -> SequenceSpan:
        """Return a span over home memory."""
        return BufferSpan(self.buffer, tokens)

    def commit(self, tokens: TokenRange, layer: int | None = None) -> None:
        """Commit memory for `tokens`, which are about to be written, in one layer or in all."""
        self.memory.commit(tokens, layer)
        if layer is None or layer < self._num_whole:
            self._whole.commit(tokens, layer)

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Copy pushed KV home, committing its memory."""
        self.commit(tokens, layer)
        self.buffer.write(layer, tokens, data)

    def copy_from(self, other: PagedRow, num_tokens: int) -> None:
        """Copy another row's first `num_tokens` tokens."""
        tokens = TokenRange(0, num_tokens)
        self.commit(tokens)
        self.buffer.copy_from(other.buffer, tokens)

    def release(self) -> None:
        """End the claim, if there is one."""
        super().release()
        self._whole.release()


R = TypeVar("R", bound=HomeRow)


class SelectiveStep(ABC, Generic[R]):
    """A StepKv whose rows of one new token attend to the keys that `choose` returns."""

    def __init__(self, layout: KvLayout, rows: Sequence[tuple[R, TokenRange]]) -> None:
        self.spans: Sequence[SequenceSpan] = [row.span(tokens) for row, tokens in rows]
        self.rows = rows
        self.choosing = [(row, tokens) for row, tokens in rows if len(tokens) == 1]
        """The rows of one new token, which choose their keys."""
        self.lengths_B = torch.tensor([tokens.end for _, tokens in self.choosing], dtype=torch.int32)
        """Tokens of each choosing row so far, the new one included."""
        self.layout = layout
        self._num_tokens = sum(len(tokens) for _, tokens in rows)
        self._places_B = torch.tensor(_places(rows))
        num_whole = min(NUM_WHOLE_LAYERS, layout.num_layers)
        self.num_chosen_layers = layout.num_layers - num_whole
        """Number of layers in which rows choose their keys."""
        others = [(row.num_kept(tokens.start), len(tokens)) for row, tokens in rows if len(tokens) != 1]
        self._num_whole_bytes = layout.row_bytes * (
            num_whole * sum(tokens.end for _, tokens in rows)
            + self.num_chosen_layers * sum(num_kept + num_new for num_kept, num_new in others)
        )
        self._num_other_bytes = layout.row_bytes * self.num_chosen_layers * sum(num_kept for num_kept, _ in others)
        self._num_picked_bytes = 0

    @property
    def num_bytes_read(self) -> int:
        """Return the bytes of KV that attention reads: in all whole layers, and in the other layers that have run."""
        return self._num_whole_bytes + self._num_picked_bytes

    @property
    def num_link_bytes(self) -> int:
        """Return the bytes read from home in layers that choose: picked keys, and keys before longer spans."""
        return self._num_other_bytes + self._num_picked_bytes

    @property
    def turns(self) -> "SelectiveStep[R]":
        """Return this step, which takes the turns itself."""
        return self

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Do nothing: all keys are in place."""

    def picks(self, layer: int, q_TNH: Tensor) -> Picks | None:
        """Return the choosing rows' picks; None in the layers that stay whole."""
        if layer < NUM_WHOLE_LAYERS:
            return None
        picks = self.choose(layer, self.of_choosing(q_TNH))
        self._num_picked_bytes += int(picks.num_BG.sum()) * self.layout.row_bytes // self.layout.num_kv_heads
        return picks

    def end(self, layer: int) -> None:
        """Do nothing: new keys stay where they were written."""

    @abstractmethod
    def choose(self, layer: int, q_BNH: Tensor) -> Picks:
        """Return the choosing rows' picks in a layer that is not whole, their own tokens included. Called once a
        layer."""

    def settle(self) -> None:
        """Add the new tokens to the index, after the forward has ended."""

    def of_choosing(self, x_T: Tensor) -> Tensor:
        """Return the choosing rows' part of `x_T`, which has an entry for each token of the step."""
        return x_T if len(self.choosing) == self._num_tokens else x_T[self._places_B]


class SelectiveResidency(ABC, Generic[R]):
    """A Residency whose rows attend to some keys. A subclass decides which."""

    traits: ClassVar[PolicyTraits]

    def __init__(self, rows: Sequence[R]) -> None:
        """`rows`: one for each slot."""
        self.num_link_bytes = 0
        self._rows = rows

    @abstractmethod
    def make_step(self, rows: Sequence[tuple[R, TokenRange]]) -> SelectiveStep[R]:
        """Return one forward's view of `rows`, whose memory is committed."""

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """Return the bytes of all layers at home; on the device those of the whole layers, and of the index."""
        return self._rows[0].bytes_for(num_tokens)

    def open(self, slot: SlotId, num_tokens: int, capacity_tokens: int) -> R:
        """Begin a claim; pushed KV is written to home memory."""
        self._rows[slot].open(num_tokens, capacity_tokens)
        return self._rows[slot]

    def copy(self, source: SlotId, target: SlotId, num_tokens: int) -> None:
        """Copy tokens between two slots within home memory."""
        self._rows[target].copy_from(self._rows[source], num_tokens)

    @contextmanager
    def step(self, rows: StepRows) -> Iterator[SelectiveStep[R]]:
        """Commit the new tokens, and yield spans over home memory. When the forward fails, the index is not updated:
        its rows have ended."""
        chosen = [(self._rows[slot], tokens) for slot, tokens in rows]
        for row, tokens in chosen:
            row.commit(tokens)
        step = self.make_step(chosen)
        try:
            yield step
            step.settle()
        finally:
            self.num_link_bytes += step.num_link_bytes

    def close(self) -> None:
        """Do nothing: this policy has no threads."""


def _places(rows: Sequence[tuple[HomeRow, TokenRange]]) -> list[int]:
    """Return the places of the choosing rows' new tokens among all of the step's tokens."""
    places, start = [], 0
    for _, tokens in rows:
        if len(tokens) == 1:
            places.append(start)
        start += len(tokens)
    return places
