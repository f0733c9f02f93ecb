"""Residency `infinigen` on a device with memory of its own: picks cross the link while the layer before computes.

A Residency for `engine.step_runner`, after InfiniGen (Lee et al., OSDI 2024), section 4. What a row's kv heads pick for
layer l + 1 is guessed from the input of layer l (lookahead 1), compared with what is hot (`hot_keys`), and what is
missing is fetched while layer l runs. New tokens' KV goes home layer by layer, beside the computing, too.

    engine:  begin l: guess l + 1, ask for what is missing | layer l | end l: store | begin l + 1 ... picks l + 1: wait
    link in:                                        fetch l + 1 -------------->
    link out:                                                            store l ---->

    home    all layers' KV but the first two
    device  the first two layers' KV, partial keys, hot keys; one piece for pushed KV, one for long spans
    link    picks that are not hot, and new tokens' KV; of longer spans (local prefill), all tokens before them

B rows of one new token, T tokens, D hidden, N heads, G kv heads, H head dim.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from baton.types import TokenRange
from generate_workers.residency.fetched.hot_keys import HotSize
from generate_workers.residency.fetched.rows import PIECE_TOKENS, FetchedRow, Pieces, others_of
from generate_workers.residency.fetched.storing import HomeStores, addresses, link_of
from generate_workers.residency.port import KvShape
from generate_workers.residency.sparse.infinigen import ScoringStep
from generate_workers.residency.steps import RowResidency
from generate_workers.residency.traits import POLICIES
from modeling.device.copying import PickedHeads
from modeling.device.port import Transfer
from modeling.forward.decoder import Decoder
from modeling.forward.selection import Picks
from modeling.kernels import native
from modeling.sparse.bases import NUM_WHOLE_LAYERS
from modeling.sparse.selection_file import PreparedSelection

_LEAST_AREAS = 2
"""Areas of a double buffer."""


class FetchedStep(ScoringStep[FetchedRow]):
    """A step that asks for a layer's picks while the layer before it runs."""

    def __init__(
        self,
        rows: Sequence[tuple[FetchedRow, TokenRange]],
        prepared: PreparedSelection,
        decoder: Decoder,
        pieces: Pieces,
    ) -> None:
        """`pieces`: those that long spans read."""
        super().__init__(rows, prepared, decoder)
        self._link, self._pieces = link_of(decoder.device), pieces
        self._stores = HomeStores(self._link)
        self._num_bytes_before = pieces.num_bytes
        self._coming: dict[int, tuple[Transfer, Picks, int]] = {}
        """By layer: the fetch of what is missing, the picks as places, and the bytes of the fetch."""
        self._own_places = [tokens.start - row.hot.start for row, tokens in self.choosing]
        self._starts_B = torch.tensor([row.hot.start for row, _ in self.choosing])
        self._slots_B = torch.tensor([row.hot.size.num_slots(tokens.end) for row, tokens in self.choosing])

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Choose the next layer's keys, and ask for those that are missing."""
        super().begin(layer, hidden_TD)
        if (picks := self._guessed.get(layer + 1)) is not None:
            self._ask(layer + 1, picks)

    def picks(self, layer: int, q_TNH: Tensor) -> Picks | None:
        """Return the choosing rows' picks as places, which are filled; None in the layers that stay whole."""
        return None if super().picks(layer, q_TNH) is None else self._coming.pop(layer)[1]

    def fetch(self, layer: int, picks: Picks, num_bytes: int) -> int:
        """Wait for what is missing of the picks, and return its bytes."""
        transfer, _, num_missing_bytes = self._coming[layer]
        transfer.join()
        return num_missing_bytes

    def end(self, layer: int) -> None:
        """Make the new tokens' partial keys, and begin to store their KV home."""
        if layer not in self._layers:
            return
        if self.choosing:
            self._end_choosing(layer)
        for _, row, span in self.longer:
            new_T2GH = span.own(layer)
            row.partial.add(layer, span.tokens.start, new_T2GH)
            self._stores.store(row.others.buffer.span(layer - NUM_WHOLE_LAYERS, span.tokens), new_T2GH)

    def settle(self) -> None:
        """Wait until all new KV is at home."""
        self._stores.settle()

    def leave(self) -> None:
        """Return when nothing is being copied."""
        for coming, *_ in self._coming.values():
            coming.wait()
        self._stores.wait()
        self.num_link_bytes += self._stores.num_bytes + self._pieces.num_bytes - self._num_bytes_before

    def _end_choosing(self, layer: int) -> None:
        at = layer - NUM_WHOLE_LAYERS
        placed = zip(self.choosing, self._own_places, strict=True)
        own = [row.hot.buffer.data[row.hot.area(at), place] for (row, _), place in placed]
        self.append_keys(layer, torch.stack([kv_2GH[0] for kv_2GH in own]))
        homes = [row.others.buffer.data[at, tokens.start] for row, tokens in self.choosing]
        self._stores.begin(layer, own, homes)

    def _ask(self, layer: int, picks: Picks) -> None:
        """Find places for a layer's picks, and begin to fetch those that are missing."""
        at, hot = layer - NUM_WHOLE_LAYERS, [row.hot for row, _ in self.choosing]
        self._stores.join(layer - hot[0].size.num_areas)  # the layer that had the area
        places_BGK, pairs_BGK2, num_BG = torch.ops.baton.admit_picks(
            *(picks.keys_BGK, picks.num_BG),
            torch.tensor([each.record_address(at) for each in hot]),
            *(self._slots_B, self._starts_B, self.lengths_B.long()),
            torch.tensor([each.takes_over(at) for each in hot]),
            *(hot[0].size.num_latest, hot[0].most_slots),
        )
        homes_B = addresses([row.others.buffer.data[at] for row, _ in self.choosing])
        there_B = torch.tensor([each.place_address(at) for each in hot])
        head_bytes = self.layout.row_bytes // (2 * self.layout.num_kv_heads)
        heads = PickedHeads(homes_B, there_B, pairs_BGK2, num_BG, head_bytes)
        self._coming[layer] = self._link.fetch_heads(heads), Picks(places_BGK, picks.num_BG), heads.num_bytes


class FetchedInfinigenResidency(RowResidency[FetchedRow]):
    """A Residency that chooses keys by partial scores, keeps KV at home, and fetches what was picked."""

    traits = POLICIES["infinigen"]

    def __init__(
        self, shape: KvShape, prepared: PreparedSelection, decoder: Decoder, device_bytes: int | None = None
    ) -> None:
        """`prepared` must be for `decoder`. `device_bytes`: memory of the device for the KV of all slots, by which it
        is decided how much stays hot; None: no limit. Raises what is in OUT_OF_MEMORY, or OSError, when the slots'
        address space cannot be had."""
        assert native.load("hot_keys")
        device, layout = decoder.device, shape.layout
        ahead = replace(prepared, lookahead=1)
        others = others_of(layout)
        pieces = Pieces(layout, device), Pieces(layout, device)
        self.scratch_bytes = 2 * PIECE_TOKENS * layout.row_bytes + shape.long_span_bytes

        def make(num_areas: int) -> FetchedRow:
            return FetchedRow(shape, device, HotSize(others, num_areas, ahead.selection), ahead.basis, pieces)

        row = make(min(_LEAST_AREAS, others.num_layers))
        if device_bytes is None:
            row = make(others.num_layers)
        else:
            left = (device_bytes - self.scratch_bytes) // shape.num_slots - row.bytes_for(shape.max_slot_tokens).device
            more = max(left, 0) // (row.hot.bytes_for(shape.max_slot_tokens) // row.hot.size.num_areas)
            row = make(min(row.hot.size.num_areas + more, others.num_layers))
        self.num_areas = row.hot.size.num_areas
        """Layers that may keep their picks on the device from step to step."""
        rows = [row, *(make(self.num_areas) for _ in range(shape.num_slots - 1))]
        super().__init__(rows, lambda rows: FetchedStep(rows, ahead, decoder, pieces[1]))
        self._link = device.link

    def close(self) -> None:
        """End the link's threads."""
        self._link.rest()
