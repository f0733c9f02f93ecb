"""What a receiver remembers of Reserves by their numbers, so that one whose answer was lost can be undone.

A caller that does not hear what became of its Reserve aborts it by the number that it gave it. Three orders are
possible, and in none a lease is left: the Reserve was granted before (the lease ends), it is being granted (the lease
ends as soon as there is one), or it comes later (it is refused). A Reserve that is heard twice gets one lease. Step 3
of a request's way (DESIGN.md, section 4). On the loop.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from baton.clock import Clock
from baton.errors import LeaseError, UnavailableError
from baton.ids import ReserveNumber
from baton.types import Lease, LeaseRef

REMEMBER_S = 60.0
"""Seconds that a number is remembered after its Reserve or its abort: longer than a Reserve can be on its way, which
its caller gives up after a few seconds."""
MAX_REMEMBERED = 16_384
"""Numbers that are remembered at most; beyond, the oldest go first."""


@dataclass
class _Reserve:
    """What is known of one number."""

    until_s: float
    lease: Lease | None = None
    """That it was granted; None before, and after an error."""
    is_aborted: bool = False


class ReserveBook:
    """The latest Reserves of one receiver. Owned by its servicer; used on its loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: OrderedDict[ReserveNumber, _Reserve] = OrderedDict()
        """In the order in which they are forgotten."""

    def __len__(self) -> int:
        return len(self._known)

    async def grant(
        self, number: ReserveNumber, reserve: Callable[[], Awaitable[Lease]], end: Callable[[LeaseRef], None]
    ) -> Lease:
        """Return the lease that `reserve` makes, or the one that the same number got before. Raises what `reserve`
        raises, and LeaseError for a number that was aborted; a lease that was made meanwhile is given to `end`."""
        former = self._known.get(number)
        if former is not None and former.is_aborted:
            raise LeaseError(f"Reserve {number} was aborted before it came: reserve anew, with another number")
        if former is not None and former.lease is not None:
            return former.lease
        if former is not None:
            raise UnavailableError(f"Reserve {number} is under way: wait for its answer, or abort it")
        reserving = self._note(number)
        try:
            lease = await reserve()
        except BaseException:
            if not reserving.is_aborted:
                self._known.pop(number, None)  # refused or given up: the number may be tried again
            raise
        if reserving.is_aborted:
            end(lease.ref)
            raise LeaseError(f"Reserve {number} was aborted while it was granted: reserve anew, with another number")
        reserving.lease = lease
        return lease

    def abort(self, number: ReserveNumber) -> LeaseRef | None:
        """Refuse the Reserve of that number from now on. Return the lease that it was granted, if it was."""
        reserving = self._known.pop(number, None)
        aborted = self._note(number)
        aborted.is_aborted = True
        if reserving is None:
            return None
        reserving.is_aborted = True
        return None if reserving.lease is None else reserving.lease.ref

    def _note(self, number: ReserveNumber) -> _Reserve:
        """Remember a number, as the latest; forget those that are too old, or too many."""
        now_s = self._clock.now_s()
        while self._known and next(iter(self._known.values())).until_s <= now_s:
            self._known.popitem(last=False)
        while len(self._known) >= MAX_REMEMBERED:
            self._known.popitem(last=False)
        noted = self._known[number] = _Reserve(now_s + REMEMBER_S)
        return noted
