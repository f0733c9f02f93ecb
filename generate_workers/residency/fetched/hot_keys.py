"""A row's hot keys: those that its kv heads picked lately, on the device, so that only the others have to be fetched.

A row has some *areas* on the device, and layer l uses the one of number l modulo their number. With as many areas as
layers, a layer finds what it had in the step before. With fewer, layers that share an area fetch all of their picks in
each step, into memory that is reused: two areas are a double buffer. Each area has *places* for keys and values of all
kv heads:

    0 ... W - 1      the latest tokens, in order, the step's own among them: the same tokens for all kv heads
    W ... W + C - 1  slots: in each, for each kv head, a key of its own

Here is what depends on no device: which area a layer uses, whether its keys are still there, and the places of the
latest tokens. Which keys are in slots is in records, one for each area and kv head, where the device that finds places
for picks has them: `native_keys` for CPUs, `tensor_keys` for GPUs. A pick that is in no slot gets one that was never
used, else that of a key that is not picked now; those go in turn.

G kv heads, H head dim, W latest, C slots.
"""

from dataclasses import dataclass, replace

from baton.types import KvLayout, TokenRange
from generate_workers.residency.rows import MakeMemory, PagedKv
from modeling.forward.selection import Selection
from modeling.kv.buffers import KvBuffer

_MORE_LATEST = 16
"""Places for latest tokens beyond those that are always picked: how many steps pass until they move to the start."""


@dataclass(frozen=True)
class HotSize:
    """How much of a row is hot."""

    layout: KvLayout
    """Layout of the layers whose picks are fetched."""
    num_areas: int
    """Areas on the device, from 2 to the number of layers."""
    selection: Selection
    """What bounds the picks."""

    @property
    def num_latest(self) -> int:
        """Return the places for latest tokens: W."""
        return self.selection.num_last + _MORE_LATEST

    def num_slots(self, num_tokens: int) -> int:
        """Return the slots of a row of that many tokens: as many as a kv head may pick."""
        chosen = self.selection.most_by_score(num_tokens) + self.selection.num_first + self.selection.num_last
        return min(num_tokens, chosen)

    def num_places(self, num_tokens: int) -> int:
        """Return the places of a row of that many tokens."""
        return self.num_latest + self.num_slots(num_tokens)


class HotKeys:
    """A Part of a row: its areas. Used by the engine's thread, but for the begin and the end of claims."""

    def __init__(self, size: HotSize, make_memory: MakeMemory, max_tokens: int) -> None:
        """Raise what `make_memory` raises."""
        self.size = size
        self.most_slots = size.num_slots(max_tokens)
        """Slots of the longest row: C."""
        self._num_places = size.num_latest + self.most_slots
        self._kv = PagedKv(replace(size.layout, num_layers=size.num_areas), make_memory, self._num_places)
        """The areas, as layers, and their places, as tokens."""
        self.owners = [-1] * size.num_areas
        """Layer whose keys are in each area, from 0; -1: none."""
        self.start = 0
        """Position of the token in the first place."""
        self._end = 0
        """Position behind the latest token that has a place."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes that are committed now."""
        return self._kv.num_bytes

    def bytes_for(self, num_tokens: int) -> int:
        """Return the bytes of a row of so many tokens."""
        return self._kv.bytes_for(self.size.num_places(num_tokens)) if num_tokens else 0

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin a claim: nothing is hot yet."""
        self._kv.open(self.size.num_places(num_tokens), self._num_places)
        self.forget()

    def commit(self, num_tokens: int) -> None:
        """Commit memory for a row of so many tokens."""
        self._kv.memory.commit(TokenRange(0, self.size.num_places(num_tokens)))

    def copy_from(self, other: "HotKeys", num_tokens: int) -> None:
        """Do nothing: another row's keys are fetched when they are picked."""

    def forget(self) -> None:
        """Note that nothing is hot: every pick has to be fetched."""
        self.owners[:] = [-1] * len(self.owners)
        self.start = self._end = 0

    def release(self) -> None:
        """End the claim, if there is one."""
        self._kv.release()

    @property
    def buffer(self) -> KvBuffer:
        """Return the present claim's areas, as layers, and their places, as tokens."""
        return self._kv.buffer

    def places_of(self, num_tokens: int) -> int:
        """Return the places that picks may name in a row of so many tokens."""
        return self.size.num_places(num_tokens)

    def area(self, layer: int) -> int:
        """Return the number of a layer's area; layers are counted from the first that has one."""
        return layer % self.size.num_areas

    def own_place(self, position: int) -> int:
        """Return the place of a step's own token, making room for it: the latest ones that are always picked move to
        the first places when there is none."""
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
        """Return whether the layer's area has keys of another layer, or none; from now on it has this layer's."""
        area = self.area(layer)
        was = self.owners[area]
        self.owners[area] = layer
        return was != layer
