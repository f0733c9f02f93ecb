"""Checks with the server whether a caller may call, before its body is read. The server is called at most once a second
for each caller. Runs on the asyncio loop."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

from baton.errors import BatonError, DeadlineExceededError, UnauthenticatedError, UnavailableError
from gateway.upstream import Upstream

_VALID_S = 1.0
"""Seconds for which the server's answer is reused. A revoked key is refused at the latest after this time."""
_MAX_KEPT = 1024
"""Maximum number of callers whose answer is kept."""


class Access:
    """Callers that the server has recently admitted."""

    def __init__(self, upstream: Upstream, now_s: Callable[[], float] = time.monotonic) -> None:
        self._upstream, self._now_s = upstream, now_s
        self._until_s: OrderedDict[frozenset[tuple[str, str]], float] = OrderedDict()

    async def admit(self, caller: Mapping[str, str], *, must_answer: bool = False) -> None:
        """Raise the error with which the server refuses the caller: its key and tenant, as metadata of a call. While
        the server does not answer, every caller is admitted, because the request itself waits for the server;
        with `must_answer`, UnavailableError or DeadlineExceededError is raised instead."""
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
        """Return whether the server refuses callers without a key. Return False while the server does not answer."""
        try:
            await self.admit({})
        except UnauthenticatedError:
            return True
        except BatonError:
            return False
        return False
