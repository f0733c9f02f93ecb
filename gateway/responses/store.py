"""Keeps responses for a while, so that others may go on from them. Bounded by number, bytes and time.

Owned by one gateway, on its loop: another gateway does not know them, nor does this one after it is started again.
"""

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from baton.clock import Clock
from gateway.responses.bodies import Item


@dataclass(frozen=True)
class StoreLimits:
    """How much is kept, and for how long."""

    max_responses: int = 4096
    max_bytes: int = 64 * 2**20
    """Bytes of all conversations and responses, as JSON."""
    keep_s: float = 24 * 3600.0
    """Seconds after which a response is forgotten."""


DEFAULT_LIMITS = StoreLimits()


@dataclass(frozen=True)
class Kept:
    """A response, with its conversation."""

    owner: str
    """Caller that asked for it: others do not find it."""
    response: dict[str, Any]
    items: tuple[Item, ...]
    """The whole conversation, the response's own items included."""
    num_bytes: int
    until_s: float
    """When it is forgotten, on the clock."""

    @property
    def input(self) -> tuple[Item, ...]:
        """The items that the response was made from: the conversation before it."""
        return self.items[: len(self.items) - len(self.response["output"])]


class ResponseStore:
    """The responses that are kept. The oldest go first when there is no room."""

    def __init__(self, limits: StoreLimits, clock: Clock) -> None:
        self.num_bytes = 0
        self._limits = limits
        self._clock = clock
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, owner: str, response: dict[str, Any], items: tuple[Item, ...]) -> None:
        """Keep a response. One that is larger than all that may be kept is not."""
        conversation = [item.model_dump(exclude_none=True) for item in items]
        num_bytes = len(json.dumps([response, conversation]))
        if num_bytes > self._limits.max_bytes or not self._limits.max_responses:
            return
        until_s = self._clock.now_s() + self._limits.keep_s
        self._kept[response["id"]] = Kept(owner, response, items, num_bytes, until_s)
        self.num_bytes += num_bytes
        self._forget_old()
        while len(self._kept) > self._limits.max_responses or self.num_bytes > self._limits.max_bytes:
            self._drop(next(iter(self._kept)))

    def get(self, owner: str, id_: str) -> Kept | None:
        """Return a response that is kept for this caller; None when there is none of that id."""
        self._forget_old()
        kept = self._kept.get(id_)
        return kept if kept is not None and kept.owner == owner else None

    def delete(self, owner: str, id_: str) -> bool:
        """Forget a response of this caller; return whether there was one of that id."""
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
