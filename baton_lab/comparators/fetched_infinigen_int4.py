"""Residency `infinigen_int4` on a device with its own memory. KV is stored in host memory in 4 bits (packed), and the
selected keys and their values are fetched in packed form.

This is a Residency for `engine.model_runner`. The keys of a layer are selected and fetched while the previous layer
computes. They are selected by approximate scores, which are computed from partial keys: projections of the keys to
fewer dimensions. Selection is the same as in `generate_workers.residency.fetched.infinigen`. The device unpacks the
fetched keys and values into the slot's area, a buffer that holds the KV of one layer. Packing and unpacking are the
same as in `generate_workers.residency.int4.int4_infinigen`. The device also packs the KV of new tokens before it is
stored. Selected keys do not stay on the device between steps, because fetching them again needs only about a quarter of
the bytes.

    engine:  begin l: select for l + 1, fetch | layer l | end l: pack, store | begin l + 1 ... wait, unpack
    link in:                         fetch l + 1 ------->|
    link out:                                                         store l ---->

The host stores the packed KV of all layers except the first two. The device stores the KV of the first two layers, and
the partial keys. It also has an area for one layer, a double buffer for the packed KV of two layers, and memory for one
piece of pushed keys. The link between host and device carries packed KV. For a sequence with one new token, it carries
the selected keys and values of earlier tokens to the device. For a sequence with several new tokens, it carries the KV
of all tokens before them to the device. In both cases it carries the KV of the new tokens to the host.

Shape suffixes: B sequences of one new token, T tokens, D hidden, G kv heads, H head dim, K selected keys at most.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from baton.modeling.device.heads import PickedHeads
from baton.modeling.device.port import Device
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.selection import Picks
from baton.modeling.kernels import native
from baton.modeling.kv.transfers import Transfer
from baton.modeling.sparse.bases import NUM_WHOLE_LAYERS, Basis
from baton.modeling.sparse.selection_file import PreparedSelection
from baton.types import TokenRange
from generate_workers.residency.fetched.rows import PIECE_TOKENS, Pieces, bring_partial
from generate_workers.residency.fetched.storing import HomeStores, addresses, link_of
from generate_workers.residency.int4.format import Int4Format, has_int4_kernel
from generate_workers.residency.int4.int4_infinigen import InfinigenInt4Step, ScoredInt4Row
from generate_workers.residency.port import KvShape
from generate_workers.residency.row_parts import Area
from generate_workers.residency.steps import RowResidency
from generate_workers.residency.traits import POLICIES

_NUM_AREAS = 2
"""Number of layers for which the device has buffers of packed KV. They are used alternately (double buffer)."""


class FetchedInt4Row(ScoredInt4Row):
    """Memory of one slot: packed KV (4 bits) in host memory, and partial keys on the device. Partial keys are
    projections of the keys to fewer dimensions. The scores that select keys are computed from them. A step fetches
    packed KV into a buffer on the device (`codes`), and unpacks it from there."""

    def __init__(self, shape: KvShape, device: Device, basis: Basis, pieces: Pieces) -> None:
        """Create the memory of one slot. `basis`: matrices that project keys to partial keys (fewer dimensions).
        `pieces`: shared device memory into which pushed KV is fetched to compute its partial keys. Raises OSError or an
        error in OUT_OF_MEMORY if the slot's address space cannot be reserved."""
        codes = Int4Format(shape.layout).packed(_NUM_AREAS)
        self._fetched = Area(codes, device.row_memory, shape.max_slot_tokens)
        self._pushed = pieces
        more = [self._fetched]
        super().__init__(shape, device.row_memory, basis, more, make_home=device.home_memory)

    @property
    def codes(self) -> Area:
        """Return the device buffer for packed KV, with space for two layers. Each token is stored at the index of its
        position."""
        return self._fetched

    def commit(self, tokens: TokenRange) -> None:
        """Commit host memory for `tokens`, and device memory for the packed KV of all tokens up to the end of
        `tokens`."""
        super().commit(tokens)
        self._fetched.commit(tokens)

    def take_in(self, layer: int, tokens: TokenRange, kv_T2GH: Tensor) -> None:
        """Compute the partial keys of `tokens` and store them on the device. Partial keys are projections of the keys
        to fewer dimensions. They are used to compute the scores that select keys. `kv_T2GH` is the tokens' KV in host
        memory."""
        bring_partial(self.partial, self._pushed, layer, tokens, kv_T2GH)


class FetchedInt4Step(InfinigenInt4Step[FetchedInt4Row]):
    """Step that, while one layer runs, fetches the packed keys and values that are selected for the next layer."""

    def __init__(
        self,
        form: Int4Format,
        rows: Sequence[tuple[FetchedInt4Row, TokenRange]],
        prepared: PreparedSelection,
        decoder: Decoder,
    ) -> None:
        super().__init__(form, rows, prepared, decoder)
        self._head_bytes = form.head_bytes
        self._link = link_of(decoder.device)
        self._stores = HomeStores(self._link)
        self._coming: dict[int, Transfer] = {}
        """Running fetches of packed keys and values, by the layer for which they are fetched."""

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Select the keys of layer `layer` + 1, and start to fetch them. For sequences with several new tokens in this
        step, also fetch and unpack the KV of all earlier tokens in `layer`."""
        if layer in self._layers and self.longer:
            at = layer - NUM_WHOLE_LAYERS
            old = [(row, TokenRange(0, span.tokens.start)) for _, row, span in self.longer]
            copies = [
                (row.codes.buffer.span(at % _NUM_AREAS, each), row.packed.buffer.span(at, each)) for row, each in old
            ]
            self._link.fetch(copies, after=self._link.queued()).join()  # bytes are counted when they are unpacked
        super().begin(layer, hidden_TD)
        if (picks := self._guessed.get(layer + 1)) is not None:
            self._ask(layer + 1, picks)

    def fetch(self, layer: int, picks: Picks, num_bytes: int) -> int:
        """Wait until `picks`, the keys that `layer` selects, and their values are on the device in packed form. Unpack
        them into the buffer of each slot. Return the number of packed bytes."""
        self._coming[layer].join()
        return super().fetch(layer, picks, num_bytes)

    def end(self, layer: int) -> None:
        """Finish a layer: compute the new tokens' partial keys (used to select keys), pack the new tokens' KV, and
        start to copy the packed KV to host memory."""
        if layer not in self._layers:
            return
        for _, row, span in self.longer:
            row.partial.add(layer, span.tokens.start, span.own(layer))
        self._stores.join(layer - _NUM_AREAS)  # the layer that had the area
        self._of_one.pack(layer)
        self._of_more.pack(layer)
        at = layer - NUM_WHOLE_LAYERS
        if self.choosing:
            self.append_keys(layer, torch.stack(self._own_keys))
            own = [row.codes.buffer.data[at % _NUM_AREAS, tokens.start] for row, tokens in self.choosing]
            self._stores.begin(layer, own, [row.packed.buffer.data[at, tokens.start] for row, tokens in self.choosing])
        for _, row, span in self.longer:
            packed = row.codes.buffer.span(at % _NUM_AREAS, span.tokens)
            self._stores.store(row.packed.buffer.span(at, span.tokens), packed)

    def settle(self) -> None:
        """Wait until all new KV is in host memory."""
        self._stores.settle()

    def leave(self) -> None:
        """Wait until all copies between host and device have ended. Called at the end of the step, also after an
        error."""
        for coming in self._coming.values():
            coming.wait()
        self._stores.wait()
        self.num_link_bytes += self._stores.num_bytes

    def _ask(self, layer: int, picks: Picks) -> None:
        """Start to fetch the packed KV of a layer's selected keys, except those of the step's new tokens. In the device
        buffer, each key gets the index of its token's position."""
        at = layer - NUM_WHOLE_LAYERS
        is_old_BGK = picks.keys_BGK < (self.lengths_B - 1).view(-1, 1, 1)
        is_old_BGK &= torch.arange(picks.keys_BGK.shape[2]) < picks.num_BG.unsqueeze(2)
        pairs_BGK2 = torch.stack((picks.keys_BGK, picks.keys_BGK), -1)
        homes_B = addresses([row.packed.buffer.data[at] for row, _ in self.choosing])
        there_B = addresses([row.codes.buffer.data[at % _NUM_AREAS] for row, _ in self.choosing])
        num_BG = is_old_BGK.sum(2, dtype=torch.int32)  # keys ascend: the sequence's own comes last
        self._coming[layer] = self._link.fetch_heads(
            PickedHeads(homes_B, there_B, pairs_BGK2, num_BG, self._head_bytes)
        )


class FetchedInt4Residency(RowResidency[FetchedInt4Row]):
    """Residency that stores KV in host memory in 4 bits, and fetches only selected keys and values. Keys are selected
    by scores that are computed from partial keys (projections of the keys to fewer dimensions)."""

    traits = POLICIES["infinigen_int4"]

    def __init__(self, shape: KvShape, prepared: PreparedSelection, decoder: Decoder) -> None:
        """Create the residency for all slots. `prepared`: results of `baton prepare` for the model of `decoder`. The
        packing kernel must be loaded. Raises ConfigError if KV of this layout cannot be packed. Raises OSError or an
        error in OUT_OF_MEMORY if the slots' address space cannot be reserved."""
        assert has_int4_kernel() and native.load()  # the latter copies heads
        form = Int4Format(shape.layout)
        ahead, pieces = replace(prepared, lookahead=1), Pieces(shape.layout, decoder.device)
        self.scratch_bytes = PIECE_TOKENS * shape.layout.row_bytes
        rows = [FetchedInt4Row(shape, decoder.device, ahead.basis, pieces) for _ in range(shape.num_slots)]
        super().__init__(rows, lambda rows: FetchedInt4Step(form, rows, ahead, decoder))
        self._link = decoder.device.link

    def close(self) -> None:
        """Stop the threads that copy between host and device."""
        self._link.rest()
