"""Hot keys of a sequence: keys that its kv heads selected recently. Hot keys stay on the device. Other selected keys
are fetched from host memory.

A sequence has several *areas* of device memory. An area holds selected keys and values of one layer at a time. Layer l
uses area l modulo the number of areas. If there is one area per layer, a layer finds the keys that it selected in the
previous step in its area. If there are fewer areas, several layers share an area. A layer that shares its area must
fetch all of its selected keys (picks) in each step. Two areas are a double buffer. Each area has *places* (indices) for
keys and values of all kv heads:

    0 ... W - 1      the latest tokens, in order, including the step's new token: the same tokens for all kv heads
    W ... W + C - 1  cache slots: each kv head stores a key of its own, with its value, in each cache slot

This module has the parts that are the same for all devices. It determines the area of a layer, the layer whose keys an
area contains, and the places of the latest tokens. Two other modules assign keys to cache slots: `native_keys` for
CPUs, and `tensor_keys` for GPUs. They list the keys in *records*, one for each area and kv head. A pick that is not in
a cache slot gets a cache slot that was never used. If all cache slots were used, the pick replaces another key. The
cache slots are searched in cyclic order for a key that is not picked in this step.

Shape suffixes: G kv heads, H head dim, W latest, C cache slots.
"""

from dataclasses import dataclass, replace

from baton.modeling.forward.selection import Selection
from baton.modeling.kv.buffers import KvBuffer
from baton.types import KvLayout, TokenRange
from generate_workers.residency.row_parts import MakeMemory, PagedKv

_MORE_LATEST = 16
"""Number of additional places for new tokens. A place is an index in an area, which is the device memory of one layer.
The policy always selects the latest `num_last` tokens, for which an area has `num_last` places. When these and the
additional places are all used, the latest `num_last` tokens are copied to the first places."""


@dataclass(frozen=True)
class HotSize:
    """Size of a sequence's hot keys (recently selected keys on the device). They are in areas: an area is device memory
    for selected keys and values of one layer at a time. A place is an index in an area."""

    layout: KvLayout
    """Layout of the layers whose selected keys and values are fetched."""
    num_areas: int
    """Number of areas of a sequence, from 2 to the number of layers. An area is device memory for selected keys and
    values of one layer at a time."""
    selection: Selection
    """Rule that selects keys. It limits the number of keys that a kv head selects."""

    @property
    def num_latest(self) -> int:
        """Return W, the number of places (indices of an area, the device memory of one layer) for the latest tokens of
        a sequence."""
        return self.selection.num_last + _MORE_LATEST

    def num_slots(self, num_tokens: int) -> int:
        """Return the number of cache slots in an area, the device memory of one layer, for a sequence of `num_tokens`
        tokens. Each kv head stores one selected key, with its value, in each cache slot. The number is the maximum
        number of keys that a kv head selects in one layer."""
        chosen = self.selection.most_by_score(num_tokens) + self.selection.num_first + self.selection.num_last
        return min(num_tokens, chosen)

    def num_places(self, num_tokens: int) -> int:
        """Return the number of keys that an area, the device memory of one layer, can hold for each kv head, if the
        sequence has `num_tokens` tokens. These are the latest tokens' keys, and one key for each cache slot."""
        return self.num_latest + self.num_slots(num_tokens)


class HotKeys:
    """Device memory of one batch slot for hot keys (recently selected keys). It is divided into areas, each of which
    holds keys and values of one layer at a time. It is a RowPart (part of the slot's memory). Used by the engine's
    thread. Other threads may begin and end the use of the slot."""

    def __init__(self, size: HotSize, make_memory: MakeMemory, max_tokens: int) -> None:
        """Prepare memory for sequences of at most `max_tokens` tokens. Raises the errors of `make_memory`."""
        self.size = size
        self.most_slots = size.num_slots(max_tokens)
        """C, the number of cache slots per kv head in each area (device memory of one layer), if the sequence has
        `max_tokens` tokens. A cache slot holds one selected key with its value."""
        self._num_places = size.num_latest + self.most_slots
        self._kv = PagedKv(replace(size.layout, num_layers=size.num_areas), make_memory, self._num_places)
        """Memory of all areas (each holds the selected keys of one layer at a time). Layer index i of this memory is
        area i. Token index j is place j in the area."""
        self.owners = [-1] * size.num_areas
        """For each area (device memory that several layers may share), the layer whose keys it holds; -1 if it holds
        none. Layers are counted from 0, the first layer whose selected keys are fetched."""
        self.start = 0
        """Position, in the sequence, of the token whose KV is at index 0 of each area (device memory of one layer). The
        tokens after it follow in order, up to the newest token."""
        self._end = 0
        """Position after the newest token that is stored in the areas (device memory for selected keys); 0 if no token
        is stored."""

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of device memory that are committed for the slot's hot keys now."""
        return self._kv.num_bytes

    def bytes_for(self, num_tokens: int) -> int:
        """Return the number of bytes of device memory for a sequence of `num_tokens` tokens; 0 for no tokens."""
        return self._kv.bytes_for(self.size.num_places(num_tokens)) if num_tokens else 0

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin the use of the slot by a new sequence, which has no hot keys yet. `num_tokens`: number of tokens that
        are certain to be written, such as the prompt. `capacity_tokens` is not used."""
        self._kv.open(self.size.num_places(num_tokens), self._num_places)
        self.forget()

    def commit(self, num_tokens: int) -> None:
        """Commit device memory for the hot keys of a sequence of `num_tokens` tokens."""
        self._kv.memory.commit(TokenRange(0, self.size.num_places(num_tokens)))

    def copy_from(self, other: "HotKeys", num_tokens: int) -> None:
        """Do nothing: a new sequence has no hot keys. Keys are fetched when they are selected."""

    def forget(self) -> None:
        """Drop all hot keys. All keys that are selected next are then fetched."""
        self.owners[:] = [-1] * len(self.owners)
        self.start = self._end = 0

    def release(self) -> None:
        """End the current sequence's use of the slot, if there is one, and release its memory."""
        self._kv.release()

    @property
    def buffer(self) -> KvBuffer:
        """Return the current sequence's memory as a KvBuffer. Its layer index is the number of an area (device memory
        for keys of one layer at a time). Its token index is the index of a key in the area."""
        return self._kv.buffer

    def places_of(self, num_tokens: int) -> int:
        """Return the number of places (indices of an area, the device memory of one layer) that a sequence of
        `num_tokens` tokens uses. All of its selected keys are in places below this number."""
        return self.size.num_places(num_tokens)

    def area(self, layer: int) -> int:
        """Return the index of the area (device memory that several layers may share) that a layer uses. `layer` is
        counted from the first layer whose selected keys are fetched."""
        return layer % self.size.num_areas

    def own_place(self, position: int) -> int:
        """Return the index of the step's new token in each area (device memory of one layer). `position` is the token's
        position. Successive new tokens get successive indices.

        If the indices for the latest tokens are used up, the latest tokens that are always selected are first copied to
        the start of each area. If the sequence's previous token was not stored in the areas, all hot keys are dropped,
        and the new token gets index 0.
        """
        if position != self._end:
            self.forget()  # tokens in between were not run as single-token steps
            self.start = position
        elif position - self.start >= self.size.num_latest:
            kept = self.size.selection.num_last
            latest = self.buffer.data[:, position - kept - self.start : position - self.start].clone()
            self.buffer.data[:, :kept] = latest
            self.start = position - kept
        self._end = position + 1
        return position - self.start

    def takes_over(self, layer: int) -> bool:
        """Record that `layer` now uses its area (device memory that several layers may share). Return True if the layer
        must fetch all of its selected keys. This is the case if the area was empty or held keys of another layer."""
        area = self.area(layer)
        was = self.owners[area]
        self.owners[area] = layer
        return was != layer
