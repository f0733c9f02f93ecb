"""Record of the latest Reserve calls. A Reserve call grants a lease, which reserves a slot for KV for a limited time.
Each Reserve call has a number. A caller that did not receive the answer can abort its Reserve call by this number.

If an aborted call was granted a lease, this lease is ended. If the call was still running or arrives after the abort,
it fails and keeps no lease. A Reserve call that arrives twice gets one lease. Used by `baton.transport.kv_receiver`.
Calls are aborted by `orchestrator.dispatch.lease_reaper`. Runs on the event loop.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from baton.errors import LeaseError, UnavailableError
from baton.process.clock import Clock
from baton.types import Lease, LeaseRef, ReserveNumber

REMEMBER_S = 60.0
"""Seconds for which the number of a Reserve call is remembered. This is longer than a caller waits for the answer."""
MAX_REMEMBERED = 16_384
"""Maximum number of remembered Reserve calls. When it is exceeded, the oldest are forgotten first."""


@dataclass
class _Reserve:
    """State of one Reserve call, which is stored by the call's number."""

    until_s: float
    lease: Lease | None = None
    """Lease that was granted. None while the call is running, and after it failed or was aborted."""
    is_aborted: bool = False


class ReserveBook:
    """Record of the latest Reserve calls of one KV receiver. Each call is identified by its number. Owned by the
    receiver's servicer and used on its event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: OrderedDict[ReserveNumber, _Reserve] = OrderedDict()
        """Remembered Reserve calls, oldest first."""

    async def grant(
        self, number: ReserveNumber, reserve: Callable[[], Awaitable[Lease]], end: Callable[[LeaseRef], None]
    ) -> Lease:
        """Call `reserve` and return its lease. If a lease was already granted for this number, return that lease
        instead.

        Raises the errors of `reserve`, LeaseError if the number was aborted, and UnavailableError while another call
        with the same number is running. If the number is aborted while `reserve` is running, the new lease is passed to
        `end`, which ends it.
        """
        former = self._known.get(number)
        if former is not None and former.is_aborted:
            raise LeaseError(f"Reserve {number} was aborted before it came: reserve again, with another number")
        if former is not None and former.lease is not None:
            return former.lease
        if former is not None:
            raise UnavailableError(f"Reserve {number} is under way: wait for its answer, or abort it")
        reserving = self._note(number)
        try:
            lease = await reserve()
        except BaseException:
            if not reserving.is_aborted:
                self._known.pop(number, None)  # the Reserve failed: the same number may be tried again
            raise
        if reserving.is_aborted:
            end(lease.ref)
            raise LeaseError(f"Reserve {number} was aborted while it was granted: reserve again, with another number")
        reserving.lease = lease
        return lease

    def abort(self, number: ReserveNumber) -> LeaseRef | None:
        """Mark a Reserve call's number as aborted: if the call arrives later, it is refused. Return the lease that was
        granted to the call; None if it has none. The caller must end this lease."""
        reserving = self._known.pop(number, None)
        aborted = self._note(number)
        aborted.is_aborted = True
        if reserving is None:
            return None
        reserving.is_aborted = True
        return None if reserving.lease is None else reserving.lease.ref

    def _note(self, number: ReserveNumber) -> _Reserve:
        """Remember a number as the latest one. Remove numbers that are too old, and the oldest ones if there are too
        many."""
        now_s = self._clock.now_s()
        while self._known and next(iter(self._known.values())).until_s <= now_s:
            self._known.popitem(last=False)
        while len(self._known) >= MAX_REMEMBERED:
            self._known.popitem(last=False)
        noted = self._known[number] = _Reserve(now_s + REMEMBER_S)
        return noted
