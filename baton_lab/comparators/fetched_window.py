"""Residency `window` on a device with separate memory. The device holds only the first and the latest keys (and their
values).

This is a Residency for `engine.model_runner` that selects the same keys as `window`. A key that has left the window is
never selected again, so a step with one new token fetches nothing. It writes its new token behind the latest keys and
stores the token in host memory.

The host stores the KV of all layers except the first two, for all tokens. A long span (several new tokens of one
sequence in one step, as in local prefill) and sequences that share a prefix need this KV. The device stores the KV of
the first two layers. For the other layers, it stores the first keys and the latest keys, and has spare entries for
later new tokens. It also has memory for one piece of KV, through which long spans read KV. The link between host and
device carries the KV of new tokens to the host. To the device, it carries the KV of all tokens before a long span. In
the first step after a long span or a copied prefix, it also carries the window, once.

B sequences with one new token, T tokens, G kv heads, H head dim, K maximum number of selected keys. An entry (`place`)
is the device memory for the KV of one token.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from baton.modeling.device.heads import HeadLink
from baton.modeling.device.port import Copies, Device, num_bytes_of
from baton.modeling.forward.decoder import SequenceSpan
from baton.modeling.forward.selection import Picks, Selection
from baton.modeling.kernels import native
from baton.modeling.kv.buffers import BufferSpan, KvBuffer
from baton.modeling.kv.transfers import DoneTransfer, Transfer
from baton.modeling.sparse.bases import NUM_WHOLE_LAYERS
from baton.types import KvLayout, TokenRange
from baton_lab.comparators.traits import WINDOW
from baton_lab.comparators.window import first_and_last, num_latest
from generate_workers.residency.fetched.rows import (
    PIECE_TOKENS,
    AwayRow,
    Pieces,
    PlacedSpan,
    others_of,
)
from generate_workers.residency.fetched.storing import HomeStores, link_of
from generate_workers.residency.port import KvShape
from generate_workers.residency.row_parts import MakeMemory, PagedKv
from generate_workers.residency.sparse.selective import SelectiveStep, SplitSpan
from generate_workers.residency.steps import RowResidency

_MORE_LATEST = 32
"""Number of spare entries (device memory for one token each) after the latest keys. Each step stores its new token in
one of them. When all are used, the latest keys are moved back to the entries directly after the first keys."""


class WindowKeys:
    """Device memory for the first and the latest keys and values of one sequence, in all layers except the first two.
    It consists of entries for one token each. Implements RowPart (a part of a slot's memory)."""

    def __init__(self, shape: KvShape, make_memory: MakeMemory, selection: Selection) -> None:
        """Reserve address space for the window of the longest sequence that a slot can hold. Raises the errors of
        `make_memory`."""
        self._selection = selection
        self._most_places = self.num_places(shape.max_slot_tokens)
        self._kv = PagedKv(others_of(shape.layout), make_memory, self._most_places)
        self.start = selection.num_first
        """Position, in the sequence, of the oldest of the latest tokens in device memory. The latest tokens are stored
        in order, directly after the first tokens."""
        self._end = 0
        """Position after the last token whose KV is on the device; 0 if no KV is on the device."""

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of device memory that are committed now."""
        return self._kv.num_bytes

    @property
    def buffer(self) -> KvBuffer:
        """Return the memory of the current sequence as a KvBuffer. The index of a token in this KvBuffer is the result
        of `place`, not the token's position."""
        return self._kv.buffer

    def num_places(self, num_tokens: int) -> int:
        """Return the number of tokens for which a sequence of `num_tokens` tokens needs device memory: the window and
        spare entries for new tokens."""
        window = self._selection.num_first + num_latest(num_tokens, self._selection)
        return min(num_tokens, window + _MORE_LATEST)

    def bytes_for(self, num_tokens: int) -> int:
        """Return the number of bytes of device memory that a sequence of `num_tokens` tokens needs."""
        return self._kv.bytes_for(self.num_places(num_tokens))

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Start to use the slot for a new sequence. `capacity_tokens` is not used. The device does not hold any keys of
        this sequence yet."""
        self._kv.open(self.num_places(num_tokens), self._most_places)
        self.start, self._end = self._selection.num_first, 0

    def commit(self, num_tokens: int) -> None:
        """Commit device memory for the window (first and latest keys) of a sequence of `num_tokens` tokens."""
        self._kv.memory.commit(TokenRange(0, self.num_places(num_tokens)))

    def copy_from(self, other: "WindowKeys", num_tokens: int) -> None:
        """Do nothing, because the window is fetched from host memory when a step needs it."""

    def release(self) -> None:
        """Release the slot's memory, if the slot is in use."""
        self._kv.release()

    def follow(self, home: KvBuffer, num_tokens: int) -> Copies:
        """Reserve device memory for the new token at position `num_tokens`. Return the copies from the host buffer
        `home` that the step needs. If device memory lacks earlier tokens, because they were stored only in host memory,
        the whole window is copied. Otherwise, nothing is copied."""
        first = self._selection.num_first
        start = max(num_tokens + 1 - num_latest(num_tokens + 1, self._selection), first)
        copies: list[tuple[Tensor, Tensor]] = []
        if num_tokens != self._end:
            self.start = start
            for kept in (TokenRange(0, min(first, num_tokens)), TokenRange(start, max(num_tokens, start))):
                layers = range(len(home.data) if kept else 0)
                copies += [(self.buffer.span(each, self._places(kept)), home.span(each, kept)) for each in layers]
        elif self.place(num_tokens) >= self.num_places(num_tokens + 1):
            latest_LS2GH = self.buffer.data[:, self.place(start) : self.place(num_tokens)].clone()
            self.buffer.data[:, first : first + num_tokens - start] = latest_LS2GH
            self.start = start
        self._end = num_tokens + 1
        return copies

    def place(self, position: int) -> int:
        """Return the index in device memory of the token at `position` in the sequence. The token must be one of the
        first or the latest tokens."""
        first = self._selection.num_first
        return position if position < first else first + position - self.start

    def _places(self, tokens: TokenRange) -> TokenRange:
        place = self.place(tokens.start)
        return TokenRange(place, place + len(tokens))


class WindowRow(AwayRow):
    """KV storage of one sequence in host memory, with a window of its keys in device memory."""

    def __init__(self, shape: KvShape, device: Device, selection: Selection, pieces: Pieces) -> None:
        """Create the storage for one slot. Raises an error in OUT_OF_MEMORY if the slot's address space cannot be
        allocated."""
        self.window = WindowKeys(shape, device.row_memory, selection)
        super().__init__(shape, device, [self.window], pieces)

    def commit(self, tokens: TokenRange) -> None:
        """Commit host memory for `tokens`, and device memory for the first and latest keys of a sequence with
        `tokens.end` tokens."""
        super().commit(tokens)
        self.window.commit(tokens.end)

    def span(self, tokens: TokenRange) -> SequenceSpan:
        """Return the object through which the step's attention reads and writes the KV of the new tokens `tokens`. If
        `tokens` is a single token, `WindowKeys.follow` must have been called for it."""
        if len(tokens) != 1:
            return self.long_span(tokens)
        window = self.window
        places = PlacedSpan(window.buffer, tokens, window.place(tokens.start), window.num_places(tokens.end))
        return SplitSpan(BufferSpan(self.whole.buffer, tokens), places)


class FetchedWindowStep(SelectiveStep[WindowRow]):
    """Step that selects the same keys in all layers, and stores its new tokens' KV in host memory."""

    def __init__(
        self,
        rows: Sequence[tuple[WindowRow, TokenRange]],
        layout: KvLayout,
        selection: Selection,
        link: HeadLink,
        pieces: Pieces,
    ) -> None:
        """Create a step over the sequences `rows`, each with its new tokens. Start to fetch the windows (first and
        latest keys) that are not on the device. `pieces`: device memory through which sequences with several new tokens
        read KV of the host."""
        single = [(row, tokens.start) for row, tokens in rows if len(tokens) == 1]
        copies = [copy for row, start in single for copy in row.window.follow(row.others.buffer, start)]
        super().__init__(layout, rows)
        self._stores, self._pieces = HomeStores(link), pieces
        self._num_fetched = num_bytes_of(copies) - pieces.num_bytes
        self._picks: Picks | None = None
        if self.choosing:
            picks = first_and_last(self.lengths_B, selection, layout.num_kv_heads)
            self._picks = _as_places(picks, [row for row, _ in self.choosing], selection.num_first)
        # Last: nothing may fail after it.
        self._fetch: Transfer = link.fetch(copies, after=link.queued()) if copies else DoneTransfer()

    def choose(self, layer: int, q_BNH: Tensor) -> Picks:
        assert self._picks is not None, "no row chooses"
        return self._picks

    def fetch(self, layer: int, picks: Picks, num_bytes: int) -> int:
        """Wait until the first and latest keys of each sequence are on the device. Their copies were started before the
        first layer. Return 0 as the number of bytes fetched for this layer, because `leave` adds the bytes of all these
        copies to the step's total."""
        self._fetch.join()
        return 0

    def end(self, layer: int) -> None:
        """Start storing the layer's new KV in host memory."""
        at = layer - NUM_WHOLE_LAYERS
        if at < 0:
            return
        if self.choosing:
            own = [row.window.buffer.data[at, row.window.place(tokens.start)] for row, tokens in self.choosing]
            self._stores.begin(layer, own, [row.others.buffer.data[at, tokens.start] for row, tokens in self.choosing])
        for _, row, span in self.longer:
            self._stores.store(row.others.buffer.span(at, span.tokens), span.own(layer))

    def settle(self) -> None:
        """Wait until all new KV of the step is in host memory."""
        self._stores.settle()

    def leave(self) -> None:
        """Wait until all copies between host and device have ended. Called at the end of the step, also after an
        error."""
        self._fetch.wait()
        self._stores.wait()
        self.num_link_bytes += self._num_fetched + self._pieces.num_bytes + self._stores.num_bytes


class FetchedWindowResidency(RowResidency[WindowRow]):
    """Residency that attends to the first and the latest keys. In all layers except the first two, only these keys are
    in device memory; host memory holds all KV."""

    traits = WINDOW

    def __init__(self, shape: KvShape, device: Device, selection: Selection) -> None:
        """Create the residency for all slots. Raises an error in OUT_OF_MEMORY if the slots' address space cannot be
        allocated."""
        assert native.load()  # stores new KV
        pieces = Pieces(shape.layout, device)
        self.scratch_bytes = shape.long_span_bytes + PIECE_TOKENS * shape.layout.row_bytes
        rows = [WindowRow(shape, device, selection, pieces) for _ in range(shape.num_slots)]
        self._link = link_of(device)
        args = shape.layout, selection, self._link, pieces
        super().__init__(rows, lambda rows: FetchedWindowStep(rows, *args))

    def close(self) -> None:
        """Stop the threads that copy between host and device."""
        self._link.rest()


def _as_places(picks: Picks, rows: Sequence[WindowRow], num_first: int) -> Picks:
    """Convert selected keys from positions in their sequences to indexes in device memory."""
    back_B11 = torch.tensor([row.window.start for row in rows], dtype=torch.int32).view(-1, 1, 1) - num_first
    keys_BGK = torch.where(picks.keys_BGK < num_first, picks.keys_BGK, picks.keys_BGK - back_B11)
    return replace(picks, keys_BGK=keys_BGK.contiguous())
