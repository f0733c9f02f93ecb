"""Detects requests that crash workers. A request is not retried if two workers have crashed while they computed its
first tokens.

Used by `orchestrator.scheduler`. A worker that crashes leaves a note with the requests whose first tokens it was
computing. Its supervisor reads the note and adds it to the cluster view (`ClusterView.ended`). A worker that was killed
leaves no note.

A request is a suspect if the note of a crashed worker names it. Suspects are tried one at a time until they have their
first tokens (`NUM_WATCHED_TOKENS` per choice). So if a suspect crashes another worker, the note does not name other
suspects of the same step. If an attempt fails before its first tokens, the next attempt starts only when it is known
whether a worker has crashed. Runs on the event loop.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

from baton.errors import BatonError, UnavailableError
from baton.limits import MAX_CRASHES
from baton.process.crash_notes import NUM_WATCHED_TOKENS, fingerprint
from baton.types import TokenEvent
from orchestrator.dispatch.token_streams import Emit
from orchestrator.membership.members import Membership
from orchestrator.membership.view import endpoints_of
from orchestrator.requests.record import RequestRecord
from orchestrator.workers.client import Clients

logger = logging.getLogger(__name__)

_VERDICT_S = 3.0
"""Maximum seconds to wait until the supervisor reports that an unresponsive worker has ended."""


class Suspects:
    """Decides whether and when a request may be tried again after workers have crashed."""

    def __init__(self, members: Membership, clients: Clients) -> None:
        self._members = members
        self._clients = clients
        self._turn = asyncio.Lock()
        """Lock that lets only one suspect request be tried at a time."""

    @asynccontextmanager
    async def trial(self, record: RequestRecord, emit: Emit) -> AsyncIterator[Emit]:
        """Open a context for one attempt at a request. Yield the function that the attempt must call with its events
        instead of `emit`.

        If the request is a suspect, first wait until no other suspect is being tried. A request is a suspect if a
        worker has crashed while it computed the request's first tokens. Raises BatonError if `MAX_CRASHES` workers have
        crashed in this way.
        """
        if not self._check(record):
            yield emit
            return
        with ExitStack() as turn:
            await self._turn.acquire()
            turn.callback(self._turn.release)
            self._check(record)  # its other choices may have crashed workers meanwhile
            enough = record.num_output_tokens + _num_watched(record)

            def watched(event: TokenEvent) -> None:
                emit(event)
                if record.num_output_tokens >= enough:
                    turn.close()

            yield watched

    async def judge(self, record: RequestRecord, num_before: int) -> None:
        """Wait until it is known whether a worker has crashed in the group that made the last attempt fail.

        Waits for at most `_VERDICT_S` seconds. Does nothing if no group made the attempt fail, or if the attempt
        produced at least `NUM_WATCHED_TOKENS` tokens per choice, because a crash is then not blamed on the request.
        `num_before` is the request's number of output tokens before the attempt. Raises BatonError if `MAX_CRASHES`
        workers have crashed while they computed the request's first tokens.
        """
        incarnation = record.attempt.blamed
        if incarnation is None or record.num_output_tokens - num_before >= _num_watched(record):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_VERDICT_S):
                role, endpoints = endpoints_of(incarnation)
                asked = (self._answers(endpoint, role) for endpoint in endpoints)
                if not all(await asyncio.gather(*asked)):
                    await self._members.until(lambda: self._is_told(endpoints) or None, _VERDICT_S)
        self._check(record)

    async def _answers(self, endpoint: str, role: str) -> bool:
        with self._clients.use(endpoint) as worker:
            try:
                await (worker.prefill_status if role == "prefill" else worker.generation_status)(_VERDICT_S)
            except BatonError as error:
                return not isinstance(error, UnavailableError)
        return True

    def _is_told(self, endpoints: tuple[str, ...]) -> bool:
        """Return True if a worker at one of these endpoints is listed as ended, or has been replaced."""
        present = self._members.present
        ended = any(worker.endpoint in endpoints for worker in present.ended)
        return ended or not present.endpoints.issuperset(endpoints)

    def _check(self, record: RequestRecord) -> int:
        """Return the number of workers that crashed while they computed the request's first tokens. Raises BatonError
        if there are `MAX_CRASHES` or more."""
        crashed = [worker for worker in self._members.present.ended if worker.computing]
        if not crashed:
            return 0
        name = fingerprint(record.request_id, record.request.prompt_ids).hex()
        named = [worker.endpoint for worker in crashed if name in worker.computing]
        if len(named) >= MAX_CRASHES:
            logger.error("not retried request=%s: workers crashed at %s", record.request_id, ", ".join(named))
            raise BatonError(
                f"request {record.request_id} is not retried: two workers ended while they computed it: change the "
                "request; the supervisor's log has their traces"
            )
        return len(named)


def _num_watched(record: RequestRecord) -> int:
    return NUM_WATCHED_TOKENS * len(record.choices)
