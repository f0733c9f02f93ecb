"""Terms of orchestrators (`baton.transport.terms`): each start of an orchestrator's process claims the next one.

A term is claimed in a store that outlives the supervisor, if possible (`TermStore`). If the store was lost, the highest
term that a worker has reported still counts. Used on the supervisor's asyncio loop.
"""

from typing import Protocol

from baton.transport.terms import NO_TERM


class TermStore(Protocol):
    """Store of claimed terms. Several supervisors may use it at the same time."""

    def highest(self) -> int:
        """Return the highest term that was claimed; NO_TERM if there is none. Blocks."""
        ...

    def create(self, term: int) -> bool:
        """Claim a term. Return False, and change nothing, if it was claimed before. Blocks."""
        ...


class OwnTermStore:
    """TermStore for a single supervisor, which is never restarted."""

    def __init__(self) -> None:
        self._highest = NO_TERM

    def highest(self) -> int:
        return self._highest

    def create(self, term: int) -> bool:
        is_new = term > self._highest
        self._highest = max(self._highest, term)
        return is_new


class Terms:
    """Claims the terms of one cluster's orchestrators."""

    def __init__(self, store: TermStore | None = None) -> None:
        """`store`: the store of claimed terms; None: an OwnTermStore."""
        self._store = store or OwnTermStore()
        self._heard = NO_TERM
        """Highest term that a worker has reported."""

    def hear(self, term: int) -> None:
        """Record a term that a worker has reported."""
        self._heard = max(self._heard, term)

    def claim(self) -> int:
        """Claim and return a term that is higher than all terms in the store, and than all terms that workers have
        reported. Blocks."""
        term = max(self._store.highest(), self._heard) + 1
        while not self._store.create(term):
            term += 1
        return term
