"""Base classes of residency policies that select keys for attention. They store the KV, define which layers attend to
all keys, and count the bytes that attention reads.

Subclasses are Residencies for `engine.model_runner`. All KV is stored in `home`, the memory that stores KV between
steps (`residency.port`). On a CPU, attention reads the selected keys in place. On a device with its own memory, some
policies store all KV on the device, and no KV crosses the link during steps. Other policies fetch KV
(`residency.fetched`). The first two layers (whole layers) attend to all keys, because the important keys cannot be
predicted there (InfiniGen; Lee et al., 2024). The KV of these two layers, and the policy's index for selecting keys,
count as device memory. On a CPU, they count as device memory too, as if a separate device stored them:

    `home`  all KV, in whole pages
    device  the first two layers' KV, and the policy's index
    link    (host to device) in the other layers, the selected keys and values: 2 x H elements per key and kv head

Sequences of one new token select keys, even if the token is a prompt's last. Longer spans (local prefill) attend to all
keys. The selection of one sequence does not depend on other sequences.

Shape suffixes: B sequences of one new token, T tokens of all sequences, N heads, G kv heads, H head dim.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from baton.errors import ConfigError
from baton.modeling.device.port import Device
from baton.modeling.forward.decode_rows import has_native_rows
from baton.modeling.forward.decoder import SequenceSpan
from baton.modeling.forward.selection import Picks
from baton.modeling.kv.buffers import TORCH_DTYPES, BufferSpan, KvPlace, KvRows
from baton.modeling.sparse.bases import NUM_WHOLE_LAYERS
from baton.types import KvLayout, TokenRange
from generate_workers.residency.port import KvShape
from generate_workers.residency.row_parts import MakeMemory, PagedKv, RowPart, StoredRow
from generate_workers.residency.steps import RowStep

NO_CHOSEN_DRAFTS = "use speculation auto, ngram or off"
"""Advice in error messages when the configured source of drafts is not supported because its drafts select keys."""


_FULL = "use residency device or host"
"""Advice in error messages when a policy is not supported because it selects keys."""


def require_no_windows(what: str, shape: KvShape, remedy: str = _FULL) -> None:
    """Raise ConfigError if the model has sliding windows, because selecting keys is then not supported. For the error's
    text, `what` has the name and value of the setting that selects keys, and `remedy` has the advice to the user."""
    if any(window is not None for window in shape.windows):
        raise ConfigError(f"{what} is not supported for models with sliding windows: {remedy}")


def require_selective(what: str, shape: KvShape, device: Device, remedy: str = _FULL) -> None:
    """Raise ConfigError if the CPU kernels for attention to selected keys do not support the device or the model. For
    the error's text, `what` has the name and value of the setting that selects keys, and `remedy` has the advice to the
    user."""
    where = f"{what} is not supported"
    layout = shape.layout
    if not device.is_home and device.name != "emulated":
        raise ConfigError(f"{where} on device {device.name}: {remedy}, or device cpu")
    require_no_windows(what, shape, remedy)
    if not has_native_rows(device.torch_device, TORCH_DTYPES[layout.dtype], layout.head_dim):
        kernels = f"kernels in C++ for {layout.dtype} and head dim {layout.head_dim}"
        raise ConfigError(f"{where} without {kernels}: install a C++ compiler, or {remedy}")


@dataclass(frozen=True)
class SplitSpan:
    """SequenceSpan whose first two layers and other layers are stored in two separate memories."""

    whole: BufferSpan
    others: SequenceSpan
    """Span of all layers after the first two. In this span, these layers are numbered from 0."""

    @property
    def tokens(self) -> TokenRange:
        return self.whole.tokens

    def own(self, layer: int) -> Tensor:
        span, at = self._locate(layer)
        return span.own(at)

    def segments(self, layer: int) -> Iterator[KvRows]:
        span, at = self._locate(layer)
        return span.segments(at)

    def place(self) -> KvPlace:
        whole = self.whole.place()
        return replace(whole, others=self.others.place())

    def _locate(self, layer: int) -> tuple[SequenceSpan, int]:
        num_whole = len(self.whole.buffer.data)
        return (self.whole, layer) if layer < num_whole else (self.others, layer - num_whole)


class SelectiveRow(StoredRow):
    """Memory of one slot (a StoredRow) in two parts: the first two layers, which attend to all keys, and the other
    layers. The KV of the first two layers counts both as device memory and as `home`, the memory that stores KV between
    steps."""

    def __init__(
        self,
        shape: KvShape,
        make_memory: MakeMemory,
        index: RowPart | None = None,
        num_places: int | None = None,
        *,
        reads_home: bool = True,
    ) -> None:
        """`index`: the policy's index on the device, with which it selects keys. `num_places`: maximum number of tokens
        that each layer after the first two can store; None: all tokens. `reads_home`: True if `make_memory`
        returns host memory, from which attention reads the KV directly. False if it returns memory of a separate
        device. The KV of all layers then counts as device memory, not only that of the first two layers. Raises an
        error of OUT_OF_MEMORY if the slot's address space cannot be reserved."""
        layout, most = shape.layout, shape.max_slot_tokens
        num_whole = min(NUM_WHOLE_LAYERS, layout.num_layers)
        self.whole = PagedKv(replace(layout, num_layers=num_whole), make_memory, most)
        self.others = PagedKv(
            replace(layout, num_layers=layout.num_layers - num_whole), make_memory, num_places or most
        )
        self.reads_home = reads_home
        there = [self.whole] if reads_home else [self.whole, self.others]
        super().__init__([self.whole, self.others], there if index is None else [*there, index])

    def span(self, tokens: TokenRange) -> SequenceSpan:
        """Return the SequenceSpan of a step that runs the new tokens `tokens`. It covers both parts of the slot's
        memory."""
        return SplitSpan(BufferSpan(self.whole.buffer, tokens), BufferSpan(self.others.buffer, tokens))


R = TypeVar("R", bound=StoredRow)


class SelectiveStep(ABC, RowStep[R]):
    """Step in which sequences of one new token attend only to the keys that `choose` returns."""

    def __init__(self, layout: KvLayout, rows: Sequence[tuple[R, TokenRange]]) -> None:
        super().__init__(rows, num_bytes_read=0)
        self.choosing = [(row, tokens) for row, tokens in rows if row.chooses(tokens)]
        """Sequences that select keys, each with its new token. These are the sequences with exactly one new token."""
        self.lengths_B = torch.tensor([tokens.end for _, tokens in self.choosing], dtype=torch.int32)
        """Number of tokens, including the new token, of each sequence that selects keys."""
        self.layout = layout
        *starts, self._num_tokens = accumulate((len(tokens) for _, tokens in rows), initial=0)
        self._places_B = torch.tensor(
            [at for at, (row, tokens) in zip(starts, rows, strict=True) if row.chooses(tokens)]
        )
        """Index of the new token among all tokens of the step, for each sequence that selects keys."""
        placed = zip(starts, rows, self.spans, strict=True)
        self.longer = [(at, row, span) for at, (row, tokens), span in placed if not row.chooses(tokens)]
        """Sequences that do not select keys. Each entry is a tuple: the index of the sequence's first new token among
        all tokens of the step, the memory of the sequence's slot, and the sequence's span."""
        num_whole = min(NUM_WHOLE_LAYERS, layout.num_layers)
        num_others = layout.num_layers - num_whole
        num_old = sum(row.num_kept(span.tokens.start) for _, row, span in self.longer)
        num_new = sum(len(span.tokens) for *_, span in self.longer)
        num_keys = num_whole * sum(tokens.end for _, tokens in rows) + num_others * (num_old + num_new)
        self.num_bytes_read = layout.row_bytes * num_keys
        self._reads_home = any(row.reads_home for row, _ in rows)
        if self._reads_home:
            self.num_link_bytes = layout.row_bytes * num_others * num_old

    def picks(self, layer: int, q_TNH: Tensor) -> Picks | None:
        """Return the keys that sequences with one new token attend to in a layer. Return None in the first two layers,
        in which all sequences attend to all keys."""
        if layer < NUM_WHOLE_LAYERS:
            return None
        picks = self.choose(layer, self.of_choosing(q_TNH))
        num_bytes = int(picks.num_BG.sum()) * self.layout.row_bytes // self.layout.num_kv_heads
        self.num_bytes_read += num_bytes
        self.num_link_bytes += self.fetch(layer, picks, num_bytes)
        return picks

    @abstractmethod
    def choose(self, layer: int, q_BNH: Tensor) -> Picks:
        """Select the keys that sequences with one new token attend to in a layer, including the keys of the new tokens.
        Called once per layer, except for the first two layers."""

    def fetch(self, layer: int, picks: Picks, num_bytes: int) -> int:
        """Copy the selected keys and values of a layer to the memory that attention reads. Return the number of bytes
        that cross the link. `num_bytes`: size of the selected keys and values in the model's dtype. In this class,
        nothing is copied. The result is `num_bytes` if attention reads host memory directly (`reads_home`), else 0."""
        return num_bytes if self._reads_home else 0

    def of_choosing(self, x_T: Tensor) -> Tensor:
        """Return the entries of `x_T` that belong to sequences that select keys. `x_T` has an entry for each token of
        the step."""
        return x_T if len(self.choosing) == self._num_tokens else x_T[self._places_B]
