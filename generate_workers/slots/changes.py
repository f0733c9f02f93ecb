"""Changes of a group's slots that its engine has not processed yet.

`SlotTable` owns the SlotChanges. It reports changes on any thread, after it has released its own lock.
`engine.request_queue` reads the changes. The engine's thread waits on the condition of the SlotChanges.
"""

import threading

from baton.types import LeaseRef


class SlotChanges:
    """Changes of slots since the engine last read them. Thread-safe: `condition` guards all state."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        """Condition that guards this object, and that is notified of each change. The engine's request queue uses the
        same condition."""
        self.has_changed = False
        """True if a claim on a slot has begun, was committed, was renewed or has ended, or a lease was abandoned."""
        self._abandoned: list[LeaseRef] = []

    def wake(self) -> None:
        """Report that a claim on a slot has begun, was committed, was renewed or has ended."""
        with self.condition:
            self.has_changed = True
            self.condition.notify()

    def abandon(self, ref: LeaseRef) -> None:
        """Report that a lease was aborted after it had ended, or when its sequences were already in the batch. If
        sequences of the lease are in the batch, the engine must remove them from it."""
        with self.condition:
            self._abandoned.append(ref)
            self.has_changed = True
            self.condition.notify()

    def take_abandoned(self) -> list[LeaseRef]:
        """Return the leases that were reported to `abandon` since the last call."""
        with self.condition:
            abandoned, self._abandoned = self._abandoned, []
            return abandoned
