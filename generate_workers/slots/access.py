"""Who is inside a slot: writers of pushed KV, and readers that copy a row's KV away.

Steps 7 and 8 of a request's way (DESIGN.md, section 4). A slot is not claimed anew before the last of them has left, so
memory that is copied never changes hands meanwhile. Made by the SlotTable, whose lock guards what is counted.
"""

from collections.abc import Callable
from dataclasses import dataclass

from baton.types import LeaseRef, TokenRange
from generate_workers.slots.leases import Claim


@dataclass(frozen=True)
class SlotWriter:
    """One writer inside a lease: a transport.kv_sink.PushTarget. Lives inside `SlotTable.open_push`."""

    claim: Claim
    put: Callable[[Claim, int, TokenRange, memoryview], bool]

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> bool:
        """Copies a piece into place and renews the lease; False when the same piece is there already.

        Raises StaleStampError or LeaseExpiredError when the lease has ended, RangeError for a range outside it or
        partly there; then nothing is changed. `data` is exactly the range's bytes and is not kept.
        """
        return self.put(self.claim, layer, tokens, data)


class SlotReader:
    """One reader inside an active slot, from `SlotTable.open_read` to `close`. One thread at a time, any."""

    def __init__(self, claim: Claim, check: Callable[[LeaseRef], object], leave: Callable[[Claim], None]) -> None:
        self._claim = claim
        self._check = check
        self._leave = leave
        self._is_inside = True

    def check(self) -> None:
        """Raises StaleStampError when the row has been released: there is no more use for its KV."""
        self._check(self._claim.ref)

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """The KV of `tokens`, which nobody writes any more; it stays until `close`. Raises what `check` raises."""
        assert self._is_inside
        self.check()
        return self._claim.memory.row.export(layer, tokens)

    def close(self) -> None:
        """Leaves; a slot that was released meanwhile is free then. Idempotent."""
        if self._is_inside:
            self._is_inside = False
            self._leave(self._claim)
