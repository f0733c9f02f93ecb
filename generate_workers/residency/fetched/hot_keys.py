"""Hot keys of a sequence: keys that its kv heads selected recently. They stay on the device; other selected keys are
fetched.

A sequence has some *areas* on the device, and layer l uses area l modulo their number. If there is one area per layer,
a layer finds its keys of the previous step in its area. If there are fewer areas, layers that share an area fetch all
of their picks (selected keys) in each step, into memory that is reused: two areas are a double buffer. Each area has
*places* for keys and values of all kv heads:

    0 ... W - 1      the latest tokens, in order, including the step's own: the same tokens for all kv heads
    W ... W + C - 1  slots: in each, for each kv head, a key of its own

This module has the parts that do not depend on the device: the area of a layer, whether the area still has the layer's
keys, and the places of the latest tokens. Records hold the keys that are in slots, one record for each area and kv
head, on the device that finds places for picks: `native_keys` for CPUs, `tensor_keys` for GPUs. A pick that is not in a
slot gets a slot that was never used or, if there is none, the next slot in cyclic order whose key is not picked now.

Shape suffixes: G kv heads, H head dim, W latest, C slots.
"""

from dataclasses import dataclass, replace

from baton.modeling.forward.selection import Selection
from baton.modeling.kv.buffers import KvBuffer
from baton.types import KvLayout, TokenRange
from generate_workers.residency.row_parts import MakeMemory, PagedKv

_MORE_LATEST = 16
"""Number of places for latest tokens in addition to those that are always picked. After this number of steps, the
latest tokens are moved to the first places."""


@dataclass(frozen=True)
class HotSize:
    """Size of a sequence's hot keys."""

    layout: KvLayout
    """Layout of the layers whose picks are fetched."""
    num_areas: int
    """Number of areas on the device, from 2 to the number of layers."""
    selection: Selection
    """Prepared selection, which limits the number of picks."""

    @property
    def num_latest(self) -> int:
        """Return the number of places for latest tokens: W."""
        return self.selection.num_last + _MORE_LATEST

    def num_slots(self, num_tokens: int) -> int:
        """Return the number of slots for a sequence of `num_tokens` tokens, which is the maximum number of keys that a
        kv head selects."""
        chosen = self.selection.most_by_score(num_tokens) + self.selection.num_first + self.selection.num_last
        return min(num_tokens, chosen)

    def num_places(self, num_tokens: int) -> int:
        """Return the number of places for a sequence of `num_tokens` tokens."""
        return self.num_latest + self.num_slots(num_tokens)


class HotKeys:
    """RowPart of a batch slot: its areas for hot keys. Used by the engine's thread, except at the beginning and end of
    claims."""

    def __init__(self, size: HotSize, make_memory: MakeMemory, max_tokens: int) -> None:
        """Raises the errors of `make_memory`."""
        self.size = size
        self.most_slots = size.num_slots(max_tokens)
        """Number of slots for the longest sequence: C."""
        self._num_places = size.num_latest + self.most_slots
        self._kv = PagedKv(replace(size.layout, num_layers=size.num_areas), make_memory, self._num_places)
        """The areas, as layers, and their places, as tokens."""
        self.owners = [-1] * size.num_areas
        """Layer whose keys are in each area, counted from 0; -1: no layer."""
        self.start = 0
        """Position of the token at index 0."""
        self._end = 0
        """Position after the latest token that has a place."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes that are committed now."""
        return self._kv.num_bytes

    def bytes_for(self, num_tokens: int) -> int:
        """Return the bytes for a sequence of `num_tokens` tokens."""
        return self._kv.bytes_for(self.size.num_places(num_tokens)) if num_tokens else 0

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin a claim, without hot keys."""
        self._kv.open(self.size.num_places(num_tokens), self._num_places)
        self.forget()

    def commit(self, num_tokens: int) -> None:
        """Commit memory for a sequence of `num_tokens` tokens."""
        self._kv.memory.commit(TokenRange(0, self.size.num_places(num_tokens)))

    def copy_from(self, other: "HotKeys", num_tokens: int) -> None:
        """Do nothing: keys are fetched when they are picked."""

    def forget(self) -> None:
        """Drop all hot keys, so that the next picks are all fetched."""
        self.owners[:] = [-1] * len(self.owners)
        self.start = self._end = 0

    def release(self) -> None:
        """End the claim, if one exists."""
        self._kv.release()

    @property
    def buffer(self) -> KvBuffer:
        """Return the current claim's areas, as layers, and their places, as tokens."""
        return self._kv.buffer

    def places_of(self, num_tokens: int) -> int:
        """Return the number of places that picks may name in a sequence of `num_tokens` tokens."""
        return self.size.num_places(num_tokens)

    def area(self, layer: int) -> int:
        """Return the number of a layer's area; layers are counted from the first that has one."""
        return layer % self.size.num_areas

    def own_place(self, position: int) -> int:
        """Return the place of a step's own token. If no place is free, the latest tokens that are always picked move to
        the first places."""
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
        """Assign a layer's area to the layer. Return True if the area had keys of another layer, or no keys."""
        area = self.area(layer)
        was = self.owners[area]
        self.owners[area] = layer
        return was != layer
