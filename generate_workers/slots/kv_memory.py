"""KV memory of a generation group: its limits, and the memory that is promised to (reserved for) each claim on a slot.
A claim is the use of a slot by one sequence.

`slots.table` requests memory when it claims a slot. A claim is promised memory for its current tokens and some growth,
not for its maximum number of tokens. When a sequence needs more, its promise is extended if memory is free. Pages are
committed only as they are written, and never beyond the promise, so the limits hold at all times.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import InvalidArgumentError, ResourceExhaustedError
from baton.modeling.kv.buffers import OUT_OF_MEMORY
from baton.types import SlotId
from generate_workers.residency.port import KvBytes, KvShape, Residency, RowKv

_NOTHING = KvBytes()
_EXTENT_TOKENS = 64
"""Unit in tokens of an extended reservation of memory: the extended reservation is rounded up to a multiple of this
unit, if enough memory is free. Without rounding, the reservation would have to be extended for every new token."""


@dataclass(frozen=True)
class MemoryLimits:
    """Limits of the KV memory of all sequences together."""

    kv_bytes: int
    """Limit in bytes on the KV in the memory where the policy stores it between steps (`KvBytes.home`)."""
    device_bytes: int | None = None
    """Limit in bytes on the KV on the device. None: there is no separate limit for the device."""

    def exceeded_by(self, need: KvBytes) -> str:
        """Return the name and value of the limit that `need` bytes exceed; an empty string if they exceed no limit. If
        both limits are the device's memory, only the limit of the device is named."""
        if need.home > self.kv_bytes and (need.home, self.kv_bytes) != (need.device, self.device_bytes):
            return f"kv_memory_bytes = {self.kv_bytes}"
        if self.device_bytes is not None and need.device > self.device_bytes:
            return f"device_memory_bytes leaves {self.device_bytes} for KV"
        return ""


@dataclass
class Promise:
    """Memory that is reserved, but not necessarily committed yet, for one claim (use of a slot by a sequence). Owned by
    the KvMemory."""

    row: RowKv
    num_tokens: int
    """Number of tokens for which memory is reserved for the claim."""
    num_bytes: KvBytes


class KvMemory:
    """KV memory of one group, and the memory that is promised to (reserved for) each claim on a slot. Not thread-safe:
    the SlotTable's lock guards it."""

    def __init__(self, residency: Residency, shape: KvShape, limits: MemoryLimits, growth_tokens: int) -> None:
        """`growth_tokens`: number of tokens by which a new sequence can grow before its reservation of memory must be
        extended. The first reservation is for the sequence's current tokens and `growth_tokens` more, but at most for
        its maximum number of tokens."""
        self.residency = residency
        self.shape = shape
        self.limits = limits
        self.promised = KvBytes()
        """Number of bytes that are promised to (reserved for) all claims on slots together."""
        self._growth_tokens = growth_tokens

    @property
    def num_bytes_free(self) -> int:
        """Return the number of bytes of the limit `kv_bytes` that are not promised to (reserved for) any claim on a
        slot."""
        return self.limits.kv_bytes - self.promised.home

    def need(self, num_tokens: int, capacity_tokens: int, num_choices: int = 1) -> KvBytes:
        """Return the number of bytes that must be reserved for `num_choices` new sequences of `num_tokens` tokens each.
        Memory for some growth of each sequence, up to `capacity_tokens` tokens in total per sequence, is included."""
        return self.residency.bytes_for(self._first_tokens(num_tokens, capacity_tokens)) * num_choices

    def check(self, num_tokens: int, capacity_tokens: int, num_choices: int) -> None:
        """Raise InvalidArgumentError for a request that does not fit into the memory even if it is the only request.
        `num_tokens`: number of tokens of the prompt. `capacity_tokens`: maximum number of tokens of each choice."""
        alone = self.residency.bytes_for(capacity_tokens)
        for need, what in (
            (alone, f"{capacity_tokens} tokens, prompt and max_tokens,"),
            (self.need(num_tokens, capacity_tokens, num_choices), f"n = {num_choices} choices of {num_tokens} tokens"),
        ):
            limit = self.limits.exceeded_by(need)
            if limit:
                raise InvalidArgumentError(f"{what} take {_spelt(need)} of KV, and {limit}: {self._remedy(limit)}")

    def shortage(self, need: KvBytes, owed: KvBytes = _NOTHING) -> str:
        """Return the reason why `need` bytes cannot be reserved now; an empty string if they can. `owed`: bytes that
        must still be free after the reservation."""
        limit = self.limits.exceeded_by(self.promised + owed + need)
        return f"{_spelt(need)} of KV do not fit in addition to {_spelt(self.promised)}, and {limit}" if limit else ""

    def promise(self, slots: Sequence[SlotId], num_tokens: int, capacity_tokens: int) -> list[Promise]:
        """Reserve memory for a new claim on each of `slots`. If memory cannot be reserved for all of them, none is
        reserved. `num_tokens`, `capacity_tokens`: current and maximum number of tokens of each claim. The caller must
        have checked with `shortage` that the memory is free. Raises ResourceExhaustedError if the device has less
        memory than configured."""
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
        """Extend a reservation to at least `num_tokens` tokens in total. Return False, and change nothing, if too
        little memory is free."""
        extents = -(-num_tokens // _EXTENT_TOKENS) * _EXTENT_TOKENS
        for wanted in (min(extents, len(promise.row.tokens)), num_tokens):
            num_bytes = self.residency.bytes_for(wanted)
            if not self.shortage(num_bytes - promise.num_bytes):
                self.promised += num_bytes - promise.num_bytes
                promise.num_tokens, promise.num_bytes = wanted, num_bytes
                return True
        return False

    def give_back(self, promise: Promise) -> None:
        """Release the memory of a claim that has ended, and the reservation for it. No thread may use the memory any
        more."""
        promise.row.release()
        self.promised -= promise.num_bytes

    def _first_tokens(self, num_tokens: int, capacity_tokens: int) -> int:
        return min(num_tokens + self._growth_tokens, capacity_tokens)

    def _remedy(self, limit: str) -> str:
        if limit.startswith("kv_memory_bytes"):
            return "shorten the request, or raise kv_memory_bytes"
        others = "" if self.residency.traits.name == "host" else ", or use residency = host"
        return f"shorten the request, or raise device_memory_bytes{others}"


def _spelt(need: KvBytes) -> str:
    if need.home == need.device:
        return f"{need.home} bytes"
    return f"{need.home} bytes, {need.device} on the device,"
