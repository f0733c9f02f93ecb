"""Order in which one thread compiles the forms of structured outputs that wait for it: fairly among forms of different
sizes.

Forms that take seconds to compile would otherwise hold up all later forms. The size of a compiled form, which the
orchestrator measured (`StructuredOutput.compiled_bytes`), stands for the time that it takes. Forms are divided into
classes, each up to twice as large as the next smaller one. The classes get equal shares of compiled bytes
(self-clocked fair queueing: Golestani, "A self-clocked fair queueing scheme for broadband applications", INFOCOM 1994).
A form that arrives therefore waits for the form that is being compiled, for the earlier forms of its class, and for
forms of other classes: of each class, at most one form more than the bytes of these earlier forms and of itself. If no
earlier form of its class waits, this is at most one form of each larger class. No form waits forever, because later
forms of other classes get higher tags. A form that is dropped uses no share of its class.

Not thread-safe. Does no I/O.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class _Entry(Generic[Item]):
    """Item that waits for the thread."""

    item: Item
    num_bytes: int
    number: int
    """Number of the item in order of arrival."""
    start: int
    """Tag of the item that was removed last when this item arrived."""


class CompileOrder(Generic[Item]):
    """Waiting items, each with the size in bytes of its compiled form."""

    def __init__(self) -> None:
        self._waiting = dict[int, deque[_Entry[Item]]]()
        """Items of each class that has some, by the number of binary digits of their sizes, in order of arrival."""
        self._num_added = 0
        self._tag = 0
        """Tag of the item that was removed last."""
        self._last_tags = dict[int, int]()
        """Tag of the item of each class that was removed last."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, item: Item, num_bytes: int) -> None:
        """Add an item whose compiled form has `num_bytes` bytes."""
        self._num_added += 1
        entry = _Entry(item, num_bytes, self._num_added, self._tag)
        self._waiting.setdefault(num_bytes.bit_length(), deque()).append(entry)

    def take(self) -> Item:
        """Remove the next item, which is the one with the smallest tag, and return it. Raises IndexError if no item
        waits."""
        if not self._waiting:
            raise IndexError("no item waits")
        self._tag, _, size_class = min(self._first_of(size_class) for size_class in self._waiting)
        self._last_tags[size_class] = self._tag
        entry = self._waiting[size_class].popleft()
        if not self._waiting[size_class]:
            del self._waiting[size_class]
        return entry.item

    def drop(self, is_dropped: Callable[[Item], bool]) -> None:
        """Remove all items for which `is_dropped` returns True. The others wait as if these had never been added."""
        kept = {size: deque(each for each in has if not is_dropped(each.item)) for size, has in self._waiting.items()}
        self._waiting = {size_class: entries for size_class, entries in kept.items() if entries}

    def _first_of(self, size_class: int) -> tuple[int, int, int]:
        """Return the tag and the number of the first item of a class, and the class."""
        first = self._waiting[size_class][0]
        return max(first.start, self._last_tags.get(size_class, 0)) + first.num_bytes, first.number, size_class
