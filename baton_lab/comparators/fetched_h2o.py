"""Residency `h2o` on a device with separate memory. The device holds only the kept keys (and their values).

This is a Residency for `engine.model_runner` that weighs and drops keys as `h2o` does. To weigh a key means to add the
attention weights that it gets from queries to the key's sum. The keys with the smallest sums are dropped. In each layer
that selects keys (all except the first two), a sequence has P entries of device memory. An entry holds one key and
value of each kv head. There is one entry for each kept key, and one for the new token of a step. After the layer's
attention, the new token's key and value move to the entry of the key that was dropped.

The keys of a prompt are weighed layer by layer, in device memory that can hold one layer of the longest sequence. All
sequences share this memory. Then the kept keys of the prompt are copied to the entries.

The host stores the KV of all layers except the first two. It stores dropped keys too, because sequences with the same
prefix need them. The device stores the KV of the first two layers, the entries, and the positions and sums of the kept
keys. It also has memory for one layer of one sequence, and memory for one piece of KV, through which sequences with
several new tokens in one step read KV. The link between host and device carries the KV of new tokens to the host. For a
prompt, it carries to the device all KV that the prompt attends to. It carries the prompt's KV once more when the
prompt's keys are weighed.

B sequences with one new token, T tokens, N heads, G kv heads, H head dim, K kept keys, S tokens of a sequence, P
entries of device memory (`places`).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from baton.modeling.device.port import Device
from baton.modeling.forward.decoder import Decoder, SequenceSpan
from baton.modeling.kernels import native
from baton.modeling.kv.buffers import BufferSpan, KvBuffer
from baton.modeling.kv.row_memory import PAGE_BYTES
from baton.modeling.sparse.bases import NUM_WHOLE_LAYERS
from baton.types import TokenRange
from baton_lab.comparators.h2o import H2oStep, HitterIndex, WeighedRow, WeighingResidency
from baton_lab.comparators.heavy_hitters import HeavyBudget, HeavyHitters
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
from generate_workers.residency.sparse.selective import SplitSpan

_KEY_BYTES = 12
"""Number of bytes of a kept key's metadata: its position (4), its sum of attention weights (4), and the index of its
entry in device memory (4)."""


class PlacedHitters(HeavyHitters):
    """HeavyHitters that also record where each kept key is stored: the index of its entry (device memory for one key
    and value of each kv head). Keys have entries only after the prompt is complete."""

    def __init__(self, num_kv_heads: int) -> None:
        """Create a state without keys for one layer of one sequence."""
        super().__init__(num_kv_heads)
        self.places_GK = torch.zeros((num_kv_heads, 0), dtype=torch.int32)
        """Entry index in device memory of each kept key, ordered by the key's position. Empty until the prompt is
        complete."""
        self.free_G = torch.zeros(num_kv_heads, dtype=torch.int64)
        """For each kv head, index of the entry to which the new token's key and value move after attention. It is the
        entry of the dropped key. If the new token's own key was dropped, it is the entry in which this key already is,
        and nothing moves."""

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of the kept keys' metadata: positions, sums of attention weights, and entry
        indexes."""
        return super().num_bytes + self.places_GK.nbytes

    def forget_places(self) -> None:
        """Forget in which device entry each key is stored. Until `settle` is called again, no key has an entry."""
        self.places_GK = self.places_GK[:, :0]

    def settle(self, kv_S2GH: Tensor, places_P2GH: Tensor) -> None:
        """Copy the kept keys and values from the sequence's KV `kv_S2GH` to the first entries of the device memory
        `places_P2GH`, and record the entry of each key."""
        num_kv_heads, num_kept = self.positions_GK.shape
        kept_GK2H = kv_S2GH[self.positions_GK.long(), :, torch.arange(num_kv_heads).unsqueeze(1)]
        places_P2GH[:num_kept] = kept_GK2H.permute(1, 2, 0, 3)
        self.places_GK = torch.arange(num_kept, dtype=torch.int32).repeat(num_kv_heads, 1)

    def add_own(self, own_place: int) -> Tensor:
        """Record that a step's new token is stored in the entry with index `own_place`, for each kv head. Return the
        entry indexes of all kept keys and the new key, `[G, K]`."""
        own_G1 = torch.full((len(self.places_GK), 1), own_place, dtype=torch.int32)
        self.free_G = torch.full((len(self.places_GK),), self.places_GK.shape[1])
        self.places_GK = torch.cat((self.places_GK, own_G1), dim=1)
        return self.places_GK

    def move_own(self, own_place: int, places_P2GH: Tensor) -> None:
        """Move the new token's key and value within the device memory `places_P2GH`, from the entry with index
        `own_place` to the entry of the key that was dropped. Each kv head has its own dropped key. If it is the new
        token's key, nothing is moved for this kv head."""
        (heads_J,) = (self.free_G != own_place).nonzero(as_tuple=True)
        places_P2GH[self.free_G[heads_J], :, heads_J] = places_P2GH[own_place].transpose(0, 1)[heads_J]
        if self.places_GK.shape[1]:
            self.places_GK[heads_J, -1] = self.free_G[heads_J].int()

    def copy_from(self, other: HeavyHitters) -> None:
        """Copy the state of the same layer of another sequence."""
        super().copy_from(other)
        assert isinstance(other, PlacedHitters)
        self.places_GK = other.places_GK.clone()

    def _keep(self, stay_GK: Tensor) -> None:
        super()._keep(stay_GK)
        if self.places_GK.shape[1]:
            self.free_G = self.places_GK[~stay_GK].long()  # a step drops one key of each kv head
            self.places_GK = self.places_GK[stay_GK].view(len(self.places_GK), -1)


class KeptKeys:
    """Device memory for the kept keys and values of one sequence. It consists of entries, which hold one key and value
    of each kv head: one entry for each kept key, and a last one for a step's new token. Implements RowPart (a part of a
    slot's memory)."""

    def __init__(self, shape: KvShape, make_memory: MakeMemory, budget: HeavyBudget) -> None:
        """Reserve address space for the kept keys and values of the longest sequence that a slot can hold. Raises the
        errors of `make_memory`."""
        self._budget = budget
        self._most_places = self.num_places(shape.max_slot_tokens)
        self._kv = PagedKv(others_of(shape.layout), make_memory, self._most_places)
        self.own_place = 0
        """Index of the entry (memory for one key and value of each kv head) that holds a step's new token during
        attention."""

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of device memory that are committed now."""
        return self._kv.num_bytes

    @property
    def buffer(self) -> KvBuffer:
        """Return the memory of the current sequence as a KvBuffer. Indexes of tokens in this KvBuffer are the indexes
        of entries (one key and value of each kv head)."""
        return self._kv.buffer

    def num_places(self, num_prompt: int) -> int:
        """Return the number of device entries that a sequence with a prompt of `num_prompt` tokens needs. An entry is
        memory for one key and value of each kv head."""
        return sum(self._budget.of(num_prompt))

    def bytes_for(self, num_tokens: int) -> int:
        """Return the number of bytes of device memory for the kept keys and values of a sequence with a prompt of
        `num_tokens` tokens; 0 for 0 tokens. A longer prompt never needs fewer bytes."""
        return self._kv.bytes_for(self.num_places(num_tokens)) if num_tokens else 0

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Start to use the slot for a sequence with a prompt of `num_tokens` tokens. `capacity_tokens` is not used."""
        self.own_place = self.num_places(num_tokens) - 1
        self._kv.open(self.own_place + 1, self._most_places)

    def commit(self) -> None:
        """Commit device memory for all kept keys and values of the current sequence."""
        self._kv.memory.commit(TokenRange(0, self.own_place + 1))

    def copy_from(self, other: "KeptKeys", num_tokens: int) -> None:
        """Copy the kept keys and values of another sequence. All of them are copied; `num_tokens` is not used."""
        self.own_place = other.own_place
        self._kv.copy_from(other._kv, self.own_place + 1)

    def release(self) -> None:
        """Release the slot's memory, if the slot is in use."""
        self._kv.release()


class LayerMemory:
    """Device memory for the KV of one layer of one sequence. It holds the keys of a prompt while the attention weights
    that they get are summed. All sequences share it, one at a time. Used on the engine's thread."""

    def __init__(self, shape: KvShape, device: Device) -> None:
        """Allocate memory for the longest sequence that a slot can hold. Raises an error in OUT_OF_MEMORY if it cannot
        be allocated."""
        self.num_bytes = 0
        """Number of bytes fetched from host memory so far."""
        tokens = TokenRange(0, shape.max_slot_tokens)
        self._buffer = device.buffer(replace(shape.layout, num_layers=1), tokens)
        self._link = device.link
        self._held: tuple[KvBuffer, int, int] | None = None
        """Source of the data in this memory: the host buffer, the layer, and the number of leading tokens that were
        fetched. None before the first fetch."""

    def bring(self, home: KvBuffer, layer: int, tokens: TokenRange) -> Tensor:
        """Fetch a sequence's KV up to `tokens.end` from its host buffer `home`, except the tokens that are already in
        this memory. Return a view of the KV of `tokens`, `[T, 2, G, H]`."""
        held = self._held
        num_held = held[2] if held is not None and held[0] is home and held[1] == layer else 0
        missing = TokenRange(min(num_held, tokens.end), tokens.end)
        if missing:
            source_T2GH = home.span(layer, missing)
            self._link.fetch([(self._buffer.span(0, missing), source_T2GH)], after=self._link.queued()).join()
            self.num_bytes += source_T2GH.nbytes
            self._held = home, layer, tokens.end
        return self._buffer.span(0, tokens)


class KeptRow(AwayRow, WeighedRow):
    """KV storage of one sequence. All KV is in host memory, except that of the first two layers. Device memory holds
    the first two layers, and the keys that heavy hitter selection has not dropped (kept keys), with their values."""

    def __init__(
        self, shape: KvShape, device: Device, budget: HeavyBudget, pieces: Pieces, weighing: LayerMemory
    ) -> None:
        """Create the storage for one slot. `pieces`: shared device memory through which steps with several new tokens
        read KV. `weighing`: shared device memory for the keys of a prompt while their attention weights are summed.
        Raises an error in OUT_OF_MEMORY if the address space cannot be allocated."""
        self.index = HitterIndex(shape.layout, budget, PlacedHitters, _KEY_BYTES)
        self.kept = KeptKeys(shape, device.row_memory, budget)
        self._weighing = weighing
        super().__init__(shape, device, [self.kept, self.index], pieces)

    def chooses(self, tokens: TokenRange) -> bool:
        """Return True if `tokens` is a single token after the prompt. Only then does the step attend to the kept keys
        in device memory, instead of all keys."""
        return len(tokens) == 1 and tokens.start >= self.index.num_prompt

    def commit(self, tokens: TokenRange) -> None:
        """Commit host memory for `tokens`, and device memory for all kept keys and values of the sequence."""
        super().commit(tokens)
        self.kept.commit()

    def span(self, tokens: TokenRange) -> SequenceSpan:
        """Return the object through which the step's attention reads and writes the KV of the new tokens `tokens`."""
        if not self.chooses(tokens):
            return self.long_span(tokens)
        own_place = self.kept.own_place
        places = PlacedSpan(self.kept.buffer, tokens, own_place, own_place + 1)
        return SplitSpan(BufferSpan(self.whole.buffer, tokens), places)

    def read(self, layer: int, tokens: TokenRange) -> Tensor:
        """Return the KV of `tokens` in one layer, in device memory. In the first two layers it is already on the
        device; in the others it is fetched from host memory."""
        if layer < NUM_WHOLE_LAYERS:
            return self.kv(layer, tokens)
        return self._weighing.bring(self.others.buffer, layer - NUM_WHOLE_LAYERS, tokens)

    def weigh(self, layer: int, q_TNH: Tensor, tokens: TokenRange) -> Tensor:
        """Add the attention weights of the queries of `tokens` to the sums of all kept keys. Return the keys whose sums
        were increased, `[G, K]`.

        If `tokens` is a single token after the prompt, keys are returned as the indexes of their entries in device
        memory. Otherwise, they are returned as positions in the sequence.
        """
        hitters, places_P2GH = self.placed(layer)
        if not self.chooses(tokens):
            hitters.forget_places()
            positions_GK = super().weigh(layer, q_TNH, tokens)
            if tokens.end >= self.index.num_prompt:
                hitters.settle(self.read(layer, TokenRange(0, tokens.end)), places_P2GH)
            return positions_GK
        places_GK = hitters.add_own(self.kept.own_place)
        k_GKH = places_P2GH[places_GK.long(), 0, torch.arange(len(places_GK)).unsqueeze(1)]
        hitters.take_kept(q_TNH, tokens.start, k_GKH)
        self.index.drop(layer)
        return places_GK

    def placed(self, layer: int) -> tuple[PlacedHitters, Tensor]:
        """Return the heavy hitters (kept keys) of a layer other than the first two, and a view of the device memory for
        the layer's P entries, `[P, 2, G, H]`. An entry is one key and value of each kv head."""
        hitters = self.index.hitters[layer]
        assert isinstance(hitters, PlacedHitters)
        return hitters, self.kept.buffer.data[layer - NUM_WHOLE_LAYERS]


class FetchedH2oStep(H2oStep[KeptRow]):
    """Step that stores the KV of each new token in host memory. In device memory, the new token's key and value replace
    those of the key that was dropped."""

    def __init__(
        self,
        rows: Sequence[tuple[KeptRow, TokenRange]],
        decoder: Decoder,
        passing: tuple[Pieces, LayerMemory],
    ) -> None:
        """Create a step over the sequences `rows`, each with the range of its new tokens. `passing`: two temporary
        device memories for fetched KV. Sequences with several new tokens read KV through the first. The second holds
        the keys of a prompt while their attention weights are summed."""
        super().__init__(rows, decoder)
        self._stores = HomeStores(link_of(decoder.device))
        self._passing = passing
        self._num_before = sum(each.num_bytes for each in passing)

    def end(self, layer: int) -> None:
        """Finish a layer. Start to store the new tokens' KV in host memory. For sequences with several new tokens, add
        the attention weights of the new tokens' queries to the keys' sums. For each sequence with one new token, move
        the token's key and value within device memory to where the dropped key was stored."""
        at = layer - NUM_WHOLE_LAYERS
        if at < 0:
            return
        for _, row, span in self.longer:
            self._stores.store(row.others.buffer.span(at, span.tokens), span.own(layer))
        super().end(layer)
        if not self.choosing:
            return
        own = [row.kept.buffer.data[at, row.kept.own_place] for row, _ in self.choosing]
        self._stores.begin(layer, own, [row.others.buffer.data[at, tokens.start] for row, tokens in self.choosing])
        for row, _ in self.choosing:
            hitters, places_P2GH = row.placed(layer)
            hitters.move_own(row.kept.own_place, places_P2GH)

    def settle(self) -> None:
        """Record for each sequence that its keys' sums include the attention weights of the new tokens' queries. Wait
        until all new KV is in host memory. Called after the last layer."""
        super().settle()
        self._stores.settle()

    def leave(self) -> None:
        """Wait until all copies between host and device have ended. Called at the end of the step, also after an
        error."""
        self._stores.wait()
        num_passed = sum(each.num_bytes for each in self._passing) - self._num_before
        self.num_link_bytes += self._stores.num_bytes + num_passed


class FetchedH2oResidency(WeighingResidency[KeptRow]):
    """Residency that attends to heavy hitters (keys with much attention so far) and the latest keys. In all layers
    except the first two, only these keys are in device memory; host memory holds all KV."""

    def __init__(self, shape: KvShape, decoder: Decoder, budget: HeavyBudget) -> None:
        """Create the residency for all slots. Raises ConfigError if prompts whose KV was pushed cannot be rerun with
        this model. Raises OSError or an error in OUT_OF_MEMORY if the slots' address space cannot be allocated."""
        assert native.load()  # stores new KV
        device, row_bytes = decoder.device, shape.layout.row_bytes
        pieces, self._weighing = Pieces(shape.layout, device), LayerMemory(shape, device)
        passing_bytes = (PIECE_TOKENS + shape.max_slot_tokens) * row_bytes + PAGE_BYTES
        self.scratch_bytes = shape.long_span_bytes + passing_bytes
        rows = [KeptRow(shape, device, budget, pieces, self._weighing) for _ in range(shape.num_slots)]
        passing = pieces, self._weighing
        super().__init__(rows, decoder, lambda rows: FetchedH2oStep(rows, decoder, passing))
        self._link = device.link

    def close(self) -> None:
        """Stop the threads that copy between host and device."""
        self._link.rest()

    def _weigh_pushed(self, row: KeptRow, num_tokens: int) -> None:
        before = self._weighing.num_bytes
        row.kept.commit()
        super()._weigh_pushed(row, num_tokens)
        self.num_link_bytes += self._weighing.num_bytes - before
