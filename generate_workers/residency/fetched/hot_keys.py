"""Hot keys of a sequence: keys that its kv heads selected recently. Hot keys stay on the device. Other selected keys
are fetched from host memory.

A sequence has several *areas* of device memory. Layer l uses area l modulo the number of areas. If there is one area
per layer, a layer finds the keys that it selected in the previous step in its area. If there are fewer areas, layers
share them. Layers that share an area fetch all of their picks (selected keys) in each step. Two areas are a double
buffer. Each area has *places* for keys and values of all kv heads:

    0 ... W - 1      the latest tokens, in order, including the step's new token: the same tokens for all kv heads
    W ... W + C - 1  slots: each kv head stores a key of its own in each slot

This module has the parts that are the same for all devices. It determines the area of a layer, the layer whose keys an
area contains, and the places of the latest tokens. The other modules decide which key each slot contains, in *records*
(lists of the keys in slots, one for each area and kv head): `native_keys` for CPUs, `tensor_keys` for GPUs. They find a
slot for each pick. A pick that is not in a slot gets a slot that was never used. If all slots were used, it gets the
next slot, in cyclic order, whose key is not picked now.

Shape suffixes: G kv heads, H head dim, W latest, C slots.
"""

from dataclasses import dataclass, replace

from baton.modeling.forward.selection import Selection
from baton.modeling.kv.buffers import KvBuffer
from baton.types import KvLayout, TokenRange
from generate_workers.residency.row_parts import MakeMemory, PagedKv

_MORE_LATEST = 16
"""Number of places for latest tokens, in addition to those for the latest tokens that are always selected. When these
additional places are full, the tokens that are always selected are moved to the first places."""


@dataclass(frozen=True)
class HotSize:
    """Number of areas and places that a sequence's hot keys (recently selected keys on the device) need."""

    layout: KvLayout
    """Layout of the layers whose selected keys and values are fetched."""
    num_areas: int
    """Number of areas on the device, from 2 to the number of layers."""
    selection: Selection
    """Rule that selects keys. It limits the number of keys that a kv head selects."""

    @property
    def num_latest(self) -> int:
        """Return the number of places for the latest tokens of a sequence, called W."""
        return self.selection.num_last + _MORE_LATEST

    def num_slots(self, num_tokens: int) -> int:
        """Return the number of slots in an area for a sequence of `num_tokens` tokens. It is the maximum number of keys
        that a kv head selects in one layer."""
        chosen = self.selection.most_by_score(num_tokens) + self.selection.num_first + self.selection.num_last
        return min(num_tokens, chosen)

    def num_places(self, num_tokens: int) -> int:
        """Return the number of places in an area for a sequence of `num_tokens` tokens: the places for latest tokens,
        and the slots."""
        return self.num_latest + self.num_slots(num_tokens)


class HotKeys:
    """Device memory of one batch slot for hot keys (recently selected keys), divided into areas. It is a RowPart (part
    of the slot's memory). Used by the engine's thread. Other threads may begin and end the use of the slot."""

    def __init__(self, size: HotSize, make_memory: MakeMemory, max_tokens: int) -> None:
        """Prepare memory for sequences of at most `max_tokens` tokens. Raises the errors of `make_memory`."""
        self.size = size
        self.most_slots = size.num_slots(max_tokens)
        """Number of slots per area and kv head, called C, that a sequence of `max_tokens` tokens needs."""
        self._num_places = size.num_latest + self.most_slots
        self._kv = PagedKv(replace(size.layout, num_layers=size.num_areas), make_memory, self._num_places)
        """Memory of all areas. Its layers are the areas, and its tokens are the places of an area."""
        self.owners = [-1] * size.num_areas
        """Layer whose keys are in each area, or -1 if the area has no keys. Layers are counted from 0, the first layer
        whose selected keys are fetched."""
        self.start = 0
        """Position, in the sequence, of the token in place 0 of each area."""
        self._end = 0
        """Position directly after the latest token that has a place; 0 if no token has a place."""

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of memory that are committed now."""
        return self._kv.num_bytes

    def bytes_for(self, num_tokens: int) -> int:
        """Return the number of bytes of device memory for a sequence of `num_tokens` tokens; 0 for no tokens."""
        return self._kv.bytes_for(self.size.num_places(num_tokens)) if num_tokens else 0

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin the use of the slot by a new sequence, which has no hot keys yet."""
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
        """Return the current sequence's memory as a KvBuffer. The layers of this buffer are the areas, and its tokens
        are the places within an area."""
        return self._kv.buffer

    def places_of(self, num_tokens: int) -> int:
        """Return the number of places (indices within an area) that a sequence of `num_tokens` tokens uses. All of its
        selected keys are in places below this number."""
        return self.size.num_places(num_tokens)

    def area(self, layer: int) -> int:
        """Return the index of the area (part of the slot's device memory) that a layer uses. `layer` is counted from
        the first layer whose selected keys are fetched."""
        return layer % self.size.num_areas

    def own_place(self, position: int) -> int:
        """Return the place (index within an area) of the step's new token, which has this `position`. If the places for
        latest tokens are full, first move the latest tokens that are always selected to the first places. If the
        previous token did not get its place from this method, first drop all hot keys."""
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
        """Assign the area that a layer uses to `layer`. Return True if the area contained keys of another layer, or no
        keys: the layer must then fetch all of its selected keys."""
        area = self.area(layer)
        was = self.owners[area]
        self.owners[area] = layer
        return was != layer
