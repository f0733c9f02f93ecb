"""Order in which one thread compiles the forms of structured outputs that wait for it: fairly among forms of different
sizes.

Forms that take seconds to compile would otherwise hold up all later forms. The size of a compiled form, which the
orchestrator measured (`StructuredOutput.compiled_bytes`), stands for the time that it takes. Forms are divided into
classes, each up to twice as large as the next smaller one. The classes get equal shares of compiled bytes
(self-clocked fair queueing: Golestani, "A self-clocked fair queueing scheme for broadband applications", INFOCOM 1994).
A form that arrives therefore waits for the earlier forms of its class, and for at most one form of each larger class
in addition to the form that is being compiled. No form waits forever, because every later form gets a higher tag.

Not thread-safe. Does no I/O.
"""

import heapq
from typing import Generic, TypeVar

Item = TypeVar("Item")


class CompileOrder(Generic[Item]):
    """Waiting items, each with the size in bytes of its compiled form."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, Item]] = []
        """Heap of (tag, number of the item in order of arrival, item). The item with the smallest tag is the next."""
        self._num_added = 0
        self._tag = 0
        """Tag of the item that was removed last."""
        self._last_tags = dict[int, int]()
        """Tag of the last item of each class that was added, by the number of binary digits of the item's size."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: Item, num_bytes: int) -> None:
        """Add an item whose compiled form has `num_bytes` bytes."""
        size_class = num_bytes.bit_length()
        tag = max(self._tag, self._last_tags.get(size_class, 0)) + num_bytes
        self._last_tags[size_class] = tag
        self._num_added += 1
        heapq.heappush(self._waiting, (tag, self._num_added, item))

    def take(self) -> Item:
        """Remove the next item and return it. Raises IndexError if no item waits."""
        self._tag, _, item = heapq.heappop(self._waiting)
        return item
