"""Residency `infinigen` on a device with its own memory. KV is stored in host memory. The keys and values that a layer
selects (picks) are fetched while the previous layer computes.

A Residency for `engine.model_runner`, after InfiniGen (Lee et al., OSDI 2024), section 4. The keys that layer l + 1
selects are guessed from the input of layer l (lookahead 1). Hot keys, which were selected recently, stay on the device
(`hot_keys`). Other selected keys are fetched while layer l runs. When a layer ends, its new tokens' KV begins to be
copied to host memory. The copy continues while the next layers run.

    engine:  begin l: guess l + 1, request missing keys | layer l | end l: store | begin l + 1 ... picks l + 1: wait
    link in:                                     fetch l + 1 -------------->
    link out:                                                         store l ---->

    host    KV of all layers except the first two
    device  the first two layers' KV, partial keys (keys projected to fewer columns), hot keys, and two buffers for
            pieces of KV: one for pushed KV, one for the earlier KV of a sequence with several new tokens
    link    to the device: picks that are not hot keys; for a sequence with several new tokens, all earlier KV
            to the host: the new tokens' KV

Shape suffixes: B sequences of one new token, T tokens, D hidden, N heads, G kv heads, H head dim.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.selection import Picks
from baton.modeling.kv.transfers import DoneTransfer, Transfer
from baton.modeling.sparse.bases import NUM_WHOLE_LAYERS
from baton.modeling.sparse.selection_file import PreparedSelection
from baton.types import TokenRange
from generate_workers.residency.fetched.mechanism import FetchMechanism
from generate_workers.residency.fetched.native_keys import NativeMechanism
from generate_workers.residency.fetched.rows import PIECE_TOKENS, FetchedRow, Pieces, others_of
from generate_workers.residency.fetched.storing import HomeStores, link_of
from generate_workers.residency.fetched.tensor_keys import TensorMechanism
from generate_workers.residency.port import KvShape
from generate_workers.residency.sparse.infinigen import ScoringStep
from generate_workers.residency.steps import RowResidency
from generate_workers.residency.traits import POLICIES

_LEAST_AREAS = 2
"""Minimum number of areas per sequence. An area is device memory for the selected keys and values of one layer at a
time. Two areas are a double buffer: a layer reads one while the next layer's keys are fetched into the other."""


class FetchedStep(ScoringStep[FetchedRow]):
    """Step that fetches a layer's selected keys and values while the previous layer runs."""

    def __init__(
        self,
        rows: Sequence[tuple[FetchedRow, TokenRange]],
        prepared: PreparedSelection,
        decoder: Decoder,
        mechanism: FetchMechanism,
        pieces: Pieces,
    ) -> None:
        """Begin a step. `rows`: memory of each sequence's slot, with the range of the sequence's new tokens. `pieces`:
        buffer on the device. A sequence with several new tokens reads its earlier KV through this buffer, one piece
        (range of tokens) at a time."""
        super().__init__(rows, prepared, decoder, mechanism.scored)
        self._link, self._pieces = link_of(decoder.device), pieces
        self._stores = HomeStores(self._link)
        self._num_bytes_before = pieces.num_bytes
        self._coming: dict[int, tuple[Transfer, Picks]] = {}
        """Running fetches by layer. Each entry is a pair: the transfer of the keys that were not on the device, and all
        selected keys, as indices in the layer's device memory."""
        self._fetch: Transfer = DoneTransfer()
        """Latest fetch. All earlier fetches have ended when this one has ended."""
        self._num_picks: list[tuple[Tensor, Tensor]] = []
        """Numbers of selected keys and of fetched keys: a pair of tensors `[B, G]` for each layer whose keys have been
        selected so far. The tensors stay on the device that made them."""
        if self.choosing:
            self._keys = mechanism.begin(self.choosing)

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Select the keys of layer `layer` + 1, and begin to fetch the selected keys that are not on the device."""
        super().begin(layer, hidden_TD)
        if (picks := self._guessed.pop(layer + 1, None)) is not None:
            self._ask(layer + 1, picks)

    def picks(self, layer: int, q_TNH: Tensor) -> Picks | None:
        """Wait for the fetch of the layer's selected keys. Return the selected keys and values, as indices in the
        layer's device memory, for the sequences that select keys. Return None in the first two layers, in which
        sequences attend to all keys."""
        if layer not in self._layers:
            return None
        transfer, picks = self._coming.pop(layer)
        transfer.join()
        return picks

    def end(self, layer: int) -> None:
        """Make the new tokens' partial keys (projections of keys to fewer columns) for `layer`, and begin to copy the
        new tokens' KV to host memory."""
        if layer not in self._layers:
            return
        at = layer - NUM_WHOLE_LAYERS
        if self.choosing:
            self.append_keys(layer, self._keys.own_keys(at))
            self._stores.begin_rows(layer, self._keys.own_rows(at))
        for _, row, span in self.longer:
            new_T2GH = span.own(layer)
            row.partial.add(layer, span.tokens.start, new_T2GH)
            self._stores.store(row.others.buffer.span(at, span.tokens), new_T2GH)
        if layer == self._layers[-1]:
            self._count()

    def settle(self) -> None:
        """Wait until the new tokens' KV is in host memory. Raises the error of a failed copy."""
        self._stores.settle()

    def leave(self) -> None:
        """Wait until all fetches and stores of the step have ended."""
        self._fetch.wait()
        self._stores.wait()
        self.num_link_bytes += self._stores.num_bytes + self._pieces.num_bytes - self._num_bytes_before

    def _ask(self, layer: int, picks: Picks) -> None:
        """Find memory on the device for a layer's picks (selected keys), and begin to fetch the missing picks."""
        self._stores.join(layer - self.choosing[0][0].hot.size.num_areas)  # the layer that had the area
        places, heads = self._keys.admit(layer - NUM_WHOLE_LAYERS, picks)
        self._fetch = self._link.fetch_heads(heads)
        self._coming[layer] = self._fetch, places
        self._num_picks.append((picks.num_BG, heads.num_BG))

    def _count(self) -> None:
        """Count the picked and fetched bytes. Called at the end of the last layer, because reading counts waits for the
        device."""
        if not self._num_picks:
            return
        numbers_2 = torch.stack([torch.stack(each) for each in self._num_picks]).sum((0, 2, 3))
        num_picked, num_fetched = numbers_2.tolist()
        head_bytes = self.layout.row_bytes // self.layout.num_kv_heads
        self.num_bytes_read += num_picked * head_bytes
        self.num_link_bytes += num_fetched * head_bytes


class FetchedInfinigenResidency(RowResidency[FetchedRow]):
    """Residency that stores KV in host memory, selects keys by the scores of partial keys (keys projected to fewer
    columns), and fetches the selected keys and values to the device."""

    traits = POLICIES["infinigen"]

    def __init__(
        self, shape: KvShape, prepared: PreparedSelection, decoder: Decoder, device_bytes: int | None = None
    ) -> None:
        """Create the residency. `prepared` must have been made for the model of `decoder`. `device_bytes` limits the
        device memory for the KV of all slots, and thereby the number of areas (buffers for the selected keys and values
        of a layer); None: no limit. Raises OSError, or one of the errors in OUT_OF_MEMORY, if the slots' address space
        cannot be reserved."""
        device, layout = decoder.device, shape.layout
        pieces = Pieces(layout, device), Pieces(layout, device)
        make = TensorMechanism if device.name == "cuda" else NativeMechanism
        mechanism: FetchMechanism = make(shape, decoder, prepared, pieces)
        passing_bytes = 2 * PIECE_TOKENS * layout.row_bytes + shape.long_span_bytes
        self.scratch_bytes = passing_bytes + mechanism.scratch_bytes
        self.num_areas = others_of(layout).num_layers
        """Number of areas per sequence. An area is device memory for the selected keys and values of one layer at a
        time. If there is one area per layer, a layer's selected keys stay in its area until the next step."""
        num_rows = shape.num_slots
        if device_bytes is not None:
            left = max(device_bytes - self.scratch_bytes, 0)
            self.num_areas = _num_areas(left // num_rows, mechanism, self.num_areas)
            num_rows = max(min(num_rows, left // mechanism.row_bytes(self.num_areas)), 1)
        rows = mechanism.make_rows(self.num_areas, num_rows)
        ahead = replace(prepared, lookahead=1, basis=mechanism.basis)
        super().__init__(rows, lambda rows: FetchedStep(rows, ahead, decoder, mechanism, pieces[1]))
        self._link = device.link

    def close(self) -> None:
        """Stop the threads that copy data over the link between host and device."""
        self._link.rest()


def _num_areas(bytes_each: int, mechanism: FetchMechanism, num_layers: int) -> int:
    """Return the number of areas of a sequence that fit into `bytes_each` bytes: at least two, as a double buffer, and
    at most one per layer. An area is device memory for the selected keys and values of one layer at a time."""
    least = min(_LEAST_AREAS, num_layers)
    if least == num_layers:
        return least
    least_bytes = mechanism.row_bytes(least)
    area_bytes = mechanism.row_bytes(least + 1) - least_bytes
    return min(least + max(bytes_each - least_bytes, 0) // area_bytes, num_layers)
