"""List of the requests that wait or run, and of the requests that ended last, for operators and clients.

Written by `orchestrator.observability.journal`; served over gRPC by `orchestrator.api.frontend`. It never contains
prompts or outputs. The id of a request is shown only to its tenant and to operators. On the loop.
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
    """Requests of one orchestrator: the records of unfinished requests, and the results of the requests that ended
    last."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[int, RequestRecord]] = {}
        """Number and record of each unfinished request, in order of arrival, by `id(record)`."""
        self._ended: deque[RequestStatus] = deque(maxlen=NUM_KEPT)
        """Requests that ended last, in order of their ends."""

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
        """Return all unfinished requests and the last `num_ended` requests that have ended.

        `tenant` is the name of the caller's tenant; None for an operator. Ids and tenants of other tenants' requests
        are left empty, except for an operator.
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
