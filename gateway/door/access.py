"""Asks the server who may call, before a body is read: once a second for each caller. On the loop."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

from baton.errors import DeadlineExceededError, UnavailableError
from gateway.upstream import Upstream

_VALID_S = 1.0
"""Seconds for which an answer holds: a key that was revoked is refused after as many."""
_MAX_KEPT = 1024
"""Callers whose answer is kept."""
_WHO = ("authorization", "baton-tenant")


class Access:
    """Callers that the server has admitted a moment ago."""

    def __init__(self, upstream: Upstream, now_s: Callable[[], float] = time.monotonic) -> None:
        self._upstream, self._now_s = upstream, now_s
        self._until_s: OrderedDict[tuple[str, ...], float] = OrderedDict()

    async def admit(self, caller: Mapping[str, str]) -> None:
        """Raise what the server refuses the caller with. While it does not answer every caller is admitted: the
        request itself waits for it, as far as it may."""
        who = tuple(caller.get(name, "") for name in _WHO)
        if self._until_s.get(who, 0.0) > self._now_s():
            return
        try:
            await self._upstream.model({name: caller[name] for name in _WHO if name in caller})
        except (UnavailableError, DeadlineExceededError):
            return
        self._until_s[who] = self._now_s() + _VALID_S
        self._until_s.move_to_end(who)
        while len(self._until_s) > _MAX_KEPT:
            self._until_s.popitem(last=False)
