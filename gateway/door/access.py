"""Checks with the server that a caller is permitted, before the caller's body is read. The server is called at most
once a second for each permitted caller. Runs on the asyncio loop."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

from baton.errors import BatonError, DeadlineExceededError, UnauthenticatedError, UnavailableError
from gateway.upstream import Upstream

_VALID_S = 1.0
"""Time in seconds for which the server's permission is reused. A revoked key is refused after at most this time."""
_MAX_KEPT = 1024
"""Maximum number of callers whose permission is cached."""


class Access:
    """Cache of the callers that the server has recently permitted."""

    def __init__(self, upstream: Upstream, now_s: Callable[[], float] = time.monotonic) -> None:
        self._upstream, self._now_s = upstream, now_s
        self._until_s: OrderedDict[frozenset[tuple[str, str]], float] = OrderedDict()

    async def admit(self, caller: Mapping[str, str], *, must_answer: bool = False) -> None:
        """Check that the server permits a caller, and raise the server's error if it does not. `caller` has the
        caller's key and tenant, as the metadata of a call to the server.

        If the server does not answer this check, every caller is admitted: the request is then sent to the server,
        which checks the caller itself. If `must_answer` is true, UnavailableError or DeadlineExceededError is raised
        instead.
        """
        who = frozenset(caller.items())
        if self._until_s.get(who, 0.0) > self._now_s():
            return
        try:
            await self._upstream.model(caller)
        except (UnavailableError, DeadlineExceededError):
            if must_answer:
                raise
            return
        self._until_s[who] = self._now_s() + _VALID_S
        self._until_s.move_to_end(who)
        while len(self._until_s) > _MAX_KEPT:
            self._until_s.popitem(last=False)

    async def requires_key(self) -> bool:
        """Return True if the server refuses callers without a key. Return False if the server does not answer."""
        try:
            await self.admit({})
        except UnauthenticatedError:
            return True
        except BatonError:
            return False
        return False
