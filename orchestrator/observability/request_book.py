"""List of the requests that wait or run, and of the requests that ended most recently, for operators and clients.

Written by `orchestrator.observability.journal`; served over gRPC by `orchestrator.api.frontend`. The list never
contains prompts or outputs. The id of a request is shown only to its tenant and to operators. Runs on the event loop.
"""

import itertools
from collections import deque
from dataclasses import replace

from baton.process.clock import Clock
from baton.results.request_list import RequestList, RequestStatus
from baton.results.timings import Timings
from orchestrator.observability.traces import NUM_KEPT
from orchestrator.requests.record import Finished, RequestRecord


class RequestBook:
    """List of the requests of one orchestrator. It holds the records of unfinished requests, and the results of the
    requests that ended most recently."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[int, RequestRecord]] = {}
        """Sequence number and record of each unfinished request, in order of arrival. The key is `id(record)`."""
        self._ended: deque[RequestStatus] = deque(maxlen=NUM_KEPT)
        """Status of the requests that ended most recently, in the order in which they ended."""

    def opened(self, record: RequestRecord) -> None:
        """Add a request that the queue has accepted."""
        self._open[id(record)] = next(self._numbers), record

    def ended(self, record: RequestRecord, finished: Finished) -> None:
        """Store the result of a request, and drop its record."""
        number, _ = self._open.pop(id(record))
        error = "" if finished.error is None else type(finished.error).__name__
        status = _status(number, record, finished.timings)
        self._ended.append(replace(status, reasons=finished.reasons, error=error))

    def list(self, num_ended: int, tenant: str | None) -> RequestList:
        """Return all unfinished requests, and the `num_ended` requests that ended most recently.

        `tenant` is the name of the caller's tenant; None for an operator. A tenant sees the requests of other tenants
        without their ids and tenant names. An operator sees all fields.
        """
        found = list(itertools.islice(reversed(self._ended), num_ended))
        found += [_status(number, record, record.timings()) for number, record in self._open.values()]
        found.sort(key=lambda each: each.number, reverse=True)
        return RequestList(self._clock.unix_ns(), tuple(_told(each, tenant) for each in found))


def _status(number: int, record: RequestRecord, timings: Timings) -> RequestStatus:
    ranks = tuple(replace(rank, layers=()) for rank in timings.prefill.ranks)
    return RequestStatus(
        number=number,
        request_id=record.request_id,
        tenant=record.request.tenant.name,
        state=record.state.value,
        generation=record.attempt.generation,
        prefill=record.attempt.prefill,
        usage=record.usage(),
        timings=replace(timings, prefill=replace(timings.prefill, ranks=ranks)),
        num_failures=len(record.failures),
    )


def _told(status: RequestStatus, tenant: str | None) -> RequestStatus:
    is_theirs = tenant is None or tenant == status.tenant
    return status if is_theirs else replace(status, request_id="", tenant="")
