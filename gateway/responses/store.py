"""Stores responses for a limited time, so that later requests can continue their conversations. The number of
responses, their memory and their age are limited.

The store belongs to one gateway, and is used on the gateway's event loop. Responses are not shared with other gateways.
A restart of the gateway deletes them.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from baton.process.clock import Clock
from gateway.responses.bodies import Item

_ITEMS = TypeAdapter(tuple[Item, ...])
_FIELDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("content",),
}
"""Fields of each type of item, in addition to those that all types have."""
_ENTRY_BYTES = 512
"""Estimate of the bytes of memory that a response uses in addition to its texts."""


@dataclass(frozen=True)
class StoreLimits:
    """Limits of a store of responses: number, memory and age."""

    max_responses: int = 4096
    max_bytes: int = 64 * 2**20
    """Maximum total memory, in bytes, of all responses with their conversations."""
    keep_s: float = 24 * 3600.0
    """Time in seconds after which a response is deleted."""


DEFAULT_LIMITS = StoreLimits()


@dataclass(frozen=True, slots=True)
class Kept:
    """Stored response with its input items. Both are JSON, because JSON uses less memory than Python objects."""

    owner: str
    """Caller that created the response. Other callers cannot read it."""
    response: bytes
    input: bytes
    until_s: float
    """Time, in seconds of the store's clock, at which the response is deleted."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes that count against the store's memory limit."""
        return len(self.response) + len(self.input) + _ENTRY_BYTES

    def read_input(self) -> tuple[Item, ...]:
        """Return the input items of the response. Takes about 0.1 s for 16 MiB."""
        return _ITEMS.validate_json(self.input)

    def read_items(self) -> tuple[Item, ...]:
        """Return all items of the conversation: the input items and the response's output. Takes about 0.1 s for 16
        MiB."""
        return (*self.read_input(), *map(Item.model_validate, json.loads(self.response)["output"]))


class ResponseStore:
    """Store of responses. When a limit is exceeded, the oldest responses are deleted."""

    def __init__(self, limits: StoreLimits, clock: Clock) -> None:
        self.num_bytes = 0
        self._limits = limits
        self._clock = clock
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, owner: str, id_: str, response: bytes, conversation: bytes) -> None:
        """Store a response. `response` is the response as JSON. `conversation` has its input items as JSON, as
        `written` returns them. A response that alone exceeds the memory limit is not stored."""
        kept = Kept(owner, response, conversation, self._clock.now_s() + self._limits.keep_s)
        if kept.num_bytes > self._limits.max_bytes or not self._limits.max_responses:
            return
        self._kept[id_] = kept
        self.num_bytes += kept.num_bytes
        self._forget_old()
        while len(self._kept) > self._limits.max_responses or self.num_bytes > self._limits.max_bytes:
            self._drop(next(iter(self._kept)))

    def get(self, owner: str, id_: str) -> Kept | None:
        """Return the response `id_` of the caller `owner`. None if this caller has no such response."""
        self._forget_old()
        kept = self._kept.get(id_)
        return kept if kept is not None and kept.owner == owner else None

    def delete(self, owner: str, id_: str) -> bool:
        """Delete the response `id_` of the caller `owner`. Return True if it existed."""
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
    """Return items as the text of a JSON list. Fields that the type of an item does not have are omitted. Takes about
    0.1 s for 16 MiB."""
    fields = {index: {"type", "id", "status", *_FIELDS[item.type]} for index, item in enumerate(items)}
    return _ITEMS.dump_json(tuple(items), include=fields, exclude_none=True)
