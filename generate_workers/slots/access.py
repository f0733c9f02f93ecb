"""The users inside a slot: writers of pushed KV, and readers that copy a row's KV away.

`transport.kv_receiver` and `prefixes.loading` write, `prefixes.answer_saving` reads. A slot is not claimed anew before
its last writer and reader have left, so memory that is being copied never changes its owner meanwhile. `SlotTable`
makes writers and readers; its lock guards their count.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.types import LeaseRef, TokenRange
from generate_workers.residency.port import SharesPrefixes
from generate_workers.slots.leases import Claim


@dataclass(frozen=True)
class SlotWriter:
    """One writer inside a lease: a transport.kv_sink.PushTarget. Valid only inside `SlotTable.open_push`."""

    claim: Claim
    put: Callable[[Claim, int, TokenRange, memoryview], bool]

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> bool:
        """Copy a piece into place and renew the lease. Return False when the same piece is there already. Raises
        StaleStampError or LeaseExpiredError when the lease has ended, RangeError for a range outside the lease or
        partly present; then nothing is changed. `data` is exactly the range's bytes and is not kept."""
        return self.put(self.claim, layer, tokens, data)


class SlotReader:
    """One reader inside an active slot, from `SlotTable.open_read` to `close`. Any thread may use it, one at a time."""

    def __init__(self, claim: Claim, check: Callable[[LeaseRef], object], leave: Callable[[Claim], None]) -> None:
        self._claim = claim
        self._check = check
        self._leave = leave
        self._is_inside = True

    def check(self) -> None:
        """Raise StaleStampError when the row has been released, so that its KV is of no more use."""
        self._check(self._claim.ref)

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """Return the KV of `tokens`, which no writer may change any more. The view is valid until `close`. Raises
        StaleStampError when the row has been released."""
        assert self._is_inside
        self.check()
        return self._claim.memory.row.export(layer, tokens)

    def keep_prefix(self, names: Sequence[str], block_tokens: int) -> None:
        """Leave the row's first blocks to rows that begin alike, if the policy shares any. Raises StaleStampError when
        the row has been released."""
        assert self._is_inside
        self.check()
        if isinstance(self._claim.memory.row, SharesPrefixes):
            self._claim.memory.row.keep(names, block_tokens)

    def close(self) -> None:
        """Leave the slot; a slot that was released meanwhile becomes free now. Idempotent."""
        if self._is_inside:
            self._is_inside = False
            self._leave(self._claim)
