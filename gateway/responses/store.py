"""Keeps responses for a while, so that later requests may continue from them. Bounded by number, bytes and time.

Owned by one gateway, on its loop. Other gateways do not have these responses, and a restart of the gateway drops them.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from baton.process.clock import Clock
from gateway.responses.bodies import Item

_ITEMS = TypeAdapter(tuple[Item, ...])
_ENTRY_BYTES = 512
"""Bytes of memory that a response uses in addition to its texts."""


@dataclass(frozen=True)
class StoreLimits:
    """Limits on the number, memory and age of stored responses."""

    max_responses: int = 4096
    max_bytes: int = 64 * 2**20
    """Bytes of memory of all conversations and responses."""
    keep_s: float = 24 * 3600.0
    """Seconds after which a response is deleted."""


DEFAULT_LIMITS = StoreLimits()


@dataclass(frozen=True, slots=True)
class Kept:
    """A response and the conversation that it was made from, each as JSON, which takes less memory than objects."""

    owner: str
    """Caller that requested the response. Other callers cannot read it."""
    response: bytes
    input: bytes
    until_s: float
    """Time on the clock at which the response is deleted."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of memory that it is counted as."""
        return len(self.response) + len(self.input) + _ENTRY_BYTES

    def read_input(self) -> tuple[Item, ...]:
        """Return the items that the response was made from. Takes 0.1 s for 16 MiB."""
        return _ITEMS.validate_json(self.input)

    def read_items(self) -> tuple[Item, ...]:
        """Return the whole conversation, the response's own items included. Takes 0.1 s for 16 MiB."""
        return (*self.read_input(), *map(Item.model_validate, json.loads(self.response)["output"]))


class ResponseStore:
    """The responses that are kept. The oldest are dropped first when there is no room."""

    def __init__(self, limits: StoreLimits, clock: Clock) -> None:
        self.num_bytes = 0
        self._limits = limits
        self._clock = clock
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, owner: str, id_: str, response: bytes, conversation: bytes) -> None:
        """Store a response in JSON, with the conversation before it in the form that `written` returns. A response that
        alone exceeds the memory limit is not stored."""
        kept = Kept(owner, response, conversation, self._clock.now_s() + self._limits.keep_s)
        if kept.num_bytes > self._limits.max_bytes or not self._limits.max_responses:
            return
        self._kept[id_] = kept
        self.num_bytes += kept.num_bytes
        self._forget_old()
        while len(self._kept) > self._limits.max_responses or self.num_bytes > self._limits.max_bytes:
            self._drop(next(iter(self._kept)))

    def get(self, owner: str, id_: str) -> Kept | None:
        """Return the response of this caller with the id `id_`; None if none is stored."""
        self._forget_old()
        kept = self._kept.get(id_)
        return kept if kept is not None and kept.owner == owner else None

    def delete(self, owner: str, id_: str) -> bool:
        """Delete a response of this caller. Return whether a response of that id existed."""
        if self.get(owner, id_) is None:
            return False
        self._drop(id_)
        return True

    def _forget_old(self) -> None:
        now_s = self._clock.now_s()
        while self._kept and next(iter(self._kept.values())).until_s <= now_s:  # all are kept equally long
            self._drop(next(iter(self._kept)))

    def _drop(self, id_: str) -> None:
        self.num_bytes -= self._kept.pop(id_).num_bytes


def written(items: Sequence[Item]) -> bytes:
    """Return items as JSON. Takes 0.1 s for 16 MiB."""
    return _ITEMS.dump_json(tuple(items), exclude_none=True)
