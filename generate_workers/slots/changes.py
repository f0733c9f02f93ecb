"""Changes of a group's slots that its engine has not processed yet. The engine's thread waits on their condition.

`SlotTable` owns the SlotChanges and reports changes on any thread, after releasing its own lock. `engine.request_queue`
reads the changes.
"""

import threading

from baton.types import LeaseRef


class SlotChanges:
    """Changes of slots since the engine last read them. Thread-safe: `condition` guards all state."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        """Condition that is notified of each change. The engine's request queue uses it as well."""
        self.has_changed = False
        """True if a claim has begun, was committed, was renewed or has ended, or a lease was abandoned."""
        self._abandoned: list[LeaseRef] = []

    def wake(self) -> None:
        """Report that a claim has begun, was committed, was renewed or has ended."""
        with self.condition:
            self.has_changed = True
            self.condition.notify()

    def abandon(self, ref: LeaseRef) -> None:
        """Report an abort of a lease that has ended, or whose sequences are in the batch and must leave it."""
        with self.condition:
            self._abandoned.append(ref)
            self.has_changed = True
            self.condition.notify()

    def take_abandoned(self) -> list[LeaseRef]:
        """Return the leases abandoned since the last call."""
        with self.condition:
            abandoned, self._abandoned = self._abandoned, []
            return abandoned
