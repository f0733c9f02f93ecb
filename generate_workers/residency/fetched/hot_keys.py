"""Hot keys of a sequence: those that its kv heads selected lately. They stay on the device; the others are fetched.

A sequence has some *areas* on the device, and layer l uses area l modulo their number. With as many areas as layers, a
layer finds its keys of the step before. With fewer, layers that share an area fetch all of their picks in each step,
into memory that is reused: two areas are a double buffer. Each area has *places* for keys and values of all kv heads:

    0 ... W - 1      the latest tokens, in order, including the step's own: the same tokens for all kv heads
    W ... W + C - 1  slots: in each, for each kv head, a key of its own

This module has the parts that do not depend on the device: the area of a layer, whether the area still has the layer's
keys, and the places of the latest tokens. Records hold the keys that are in slots, one record for each area and kv
head, on the device that finds places for picks: `native_keys` for CPUs, `tensor_keys` for GPUs. A pick that is in no
slot gets one that was never used, else that of a key that is not picked now, one slot after another.

Shape suffixes: G kv heads, H head dim, W latest, C slots.
"""

from dataclasses import dataclass, replace

from baton.modeling.forward.selection import Selection
from baton.modeling.kv.buffers import KvBuffer
from baton.types import KvLayout, TokenRange
from generate_workers.residency.row_parts import MakeMemory, PagedKv

_MORE_LATEST = 16
"""Number of places for latest tokens beyond those that are always picked. The latest move to the start after this
number of steps."""


@dataclass(frozen=True)
class HotSize:
    """Size of a sequence's hot keys."""

    layout: KvLayout
    """Layout of the layers whose picks are fetched."""
    num_areas: int
    """Number of areas on the device, from 2 to the number of layers."""
    selection: Selection
    """Prepared selection, which bounds the number of picks."""

    @property
    def num_latest(self) -> int:
        """Return the number of places for latest tokens: W."""
        return self.selection.num_last + _MORE_LATEST

    def num_slots(self, num_tokens: int) -> int:
        """Return the number of slots for a sequence of `num_tokens` tokens, which is the most keys of a kv head."""
        chosen = self.selection.most_by_score(num_tokens) + self.selection.num_first + self.selection.num_last
        return min(num_tokens, chosen)

    def num_places(self, num_tokens: int) -> int:
        """Return the number of places for a sequence of `num_tokens` tokens."""
        return self.num_latest + self.num_slots(num_tokens)


class HotKeys:
    """Part of a slot: its areas. Used by the engine's thread, except the beginning and end of claims."""

    def __init__(self, size: HotSize, make_memory: MakeMemory, max_tokens: int) -> None:
        """Raise what `make_memory` raises."""
        self.size = size
        self.most_slots = size.num_slots(max_tokens)
        """Number of slots for the longest sequence: C."""
        self._num_places = size.num_latest + self.most_slots
        self._kv = PagedKv(replace(size.layout, num_layers=size.num_areas), make_memory, self._num_places)
        """The areas, as layers, and their places, as tokens."""
        self.owners = [-1] * size.num_areas
        """Layer whose keys are in each area, from 0; -1: none."""
        self.start = 0
        """Position of the token at index 0."""
        self._end = 0
        """Position behind the latest token that has a place."""

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
        """Forget all hot keys, so that every pick is fetched."""
        self.owners[:] = [-1] * len(self.owners)
        self.start = self._end = 0

    def release(self) -> None:
        """End the claim, if one exists."""
        self._kv.release()

    @property
    def buffer(self) -> KvBuffer:
        """Return the present claim's areas, as layers, and their places, as tokens."""
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
            self.forget()  # tokens between were computed in another way
            self.start = position
        elif position - self.start >= self.size.num_latest:
            kept = self.size.selection.num_last
            latest = self.buffer.data[:, position - kept - self.start : position - self.start].clone()
            self.buffer.data[:, :kept] = latest
            self.start = position - kept
        self._end = position + 1
        return position - self.start

    def takes_over(self, layer: int) -> bool:
        """Assign a layer's area to the layer. Return whether it had keys of another layer, or none."""
        area = self.area(layer)
        was = self.owners[area]
        self.owners[area] = layer
        return was != layer
