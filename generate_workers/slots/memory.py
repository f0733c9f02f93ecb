"""A generation group's KV memory: how much there may be, and what is promised to which slot.

Steps 3, 7 and 8 of a request's way (DESIGN.md, sections 4 and 5). A claim is promised memory for the tokens that it
has and for some that it will grow by, not for all that it might; when it outgrows that, the promise is extended, if
there is room. Pages are taken only as they are written, and always within the promise, so the limits hold at all times.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import InvalidArgumentError, ResourceExhaustedError
from baton.ids import SlotId
from generate_workers.residency.port import KvBytes, KvShape, Residency, RowKv
from modeling.kv.buffers import OUT_OF_MEMORY

_NOTHING = KvBytes()
_EXTENT_TOKENS = 64
"""By which a promise is extended, where there is room: not at every token."""


@dataclass(frozen=True)
class MemoryLimits:
    """What all rows together may take."""

    kv_bytes: int
    """At home, wherever the policy has that."""
    device_bytes: int | None = None
    """On the device; None: no limit but the other."""

    def exceeded_by(self, need: KvBytes) -> str:
        """Which limit that is beyond, with its value; empty when none is."""
        if need.home > self.kv_bytes:
            return f"kv_memory_bytes = {self.kv_bytes}"
        if self.device_bytes is not None and need.device > self.device_bytes:
            return f"device_memory_bytes leaves {self.device_bytes} for KV"
        return ""


@dataclass
class Promise:
    """A claim's memory. Owned by the KvMemory."""

    row: RowKv
    num_tokens: int
    """For which memory is promised."""
    num_bytes: KvBytes


class KvMemory:
    """All promises of a group. Guarded by its SlotTable's lock."""

    def __init__(self, residency: Residency, shape: KvShape, limits: MemoryLimits, growth_tokens: int) -> None:
        """`growth_tokens`: by how many tokens a row is expected to grow yet, when it is taken on."""
        self.residency = residency
        self.shape = shape
        self.limits = limits
        self.promised = KvBytes()
        """To all claims."""
        self._growth_tokens = growth_tokens

    @property
    def num_bytes_free(self) -> int:
        """At home: promised to nobody."""
        return self.limits.kv_bytes - self.promised.home

    def need(self, num_tokens: int, capacity_tokens: int, num_choices: int = 1) -> KvBytes:
        """What rows of `num_tokens` tokens are promised at first."""
        return self.residency.bytes_for(self._first_tokens(num_tokens, capacity_tokens)) * num_choices

    def check(self, num_tokens: int, capacity_tokens: int, num_choices: int) -> None:
        """Raises InvalidArgumentError for rows that would not fit if they were alone."""
        alone = self.residency.bytes_for(capacity_tokens)
        for need, what in (
            (alone, f"{capacity_tokens} tokens, prompt and max_tokens,"),
            (self.need(num_tokens, capacity_tokens, num_choices), f"n = {num_choices} choices of {num_tokens} tokens"),
        ):
            limit = self.limits.exceeded_by(need)
            if limit:
                raise InvalidArgumentError(f"{what} take {_spelt(need)} of KV, and {limit}: {self._remedy(limit)}")

    def shortage(self, need: KvBytes, owed: KvBytes = _NOTHING) -> str:
        """Why there is no room for `need` now, if `owed` stays free; empty when there is."""
        limit = self.limits.exceeded_by(self.promised + owed + need)
        return f"{_spelt(need)} of KV do not fit beside {_spelt(self.promised)}, and {limit}" if limit else ""

    def promise(self, slots: Sequence[SlotId], num_tokens: int, capacity_tokens: int) -> list[Promise]:
        """Memory for new claims, all or none; the caller has seen that there is room. Raises ResourceExhaustedError
        when a device has less than it was said to have."""
        made: list[Promise] = []
        first_tokens = self._first_tokens(num_tokens, capacity_tokens)
        try:
            for slot in slots:
                row = self.residency.open(slot, num_tokens, capacity_tokens)
                made.append(Promise(row, first_tokens, self.residency.bytes_for(first_tokens)))
                self.promised += made[-1].num_bytes
        except OUT_OF_MEMORY as error:
            for promise in made:
                self.give_back(promise)
            few = f"no memory for {len(slots)} slots of {capacity_tokens} tokens"
            raise ResourceExhaustedError(f"{few}: try again, or lower kv_memory_bytes") from error
        return made

    def extend(self, promise: Promise, num_tokens: int) -> bool:
        """Promises memory for `num_tokens` tokens in all; False, and nothing changed, when there is no room."""
        extents = -(-num_tokens // _EXTENT_TOKENS) * _EXTENT_TOKENS
        for wanted in (min(extents, len(promise.row.tokens)), num_tokens):
            num_bytes = self.residency.bytes_for(wanted)
            if not self.shortage(num_bytes - promise.num_bytes):
                self.promised += num_bytes - promise.num_bytes
                promise.num_tokens, promise.num_bytes = wanted, num_bytes
                return True
        return False

    def give_back(self, promise: Promise) -> None:
        """The claim has ended, and nobody touches its memory any more."""
        promise.row.release()
        self.promised -= promise.num_bytes

    def _first_tokens(self, num_tokens: int, capacity_tokens: int) -> int:
        return min(num_tokens + self._growth_tokens, capacity_tokens)

    def _remedy(self, limit: str) -> str:
        if limit.startswith("kv_memory_bytes"):
            return "shorten the request, or raise kv_memory_bytes"
        others = "" if self.residency.name == "host" else ", or use residency = host"
        return f"shorten the request, or raise device_memory_bytes{others}"


def _spelt(need: KvBytes) -> str:
    if need.home == need.device:
        return f"{need.home} bytes"
    return f"{need.home} bytes, {need.device} on the device,"
