"""Selects the next waiting request: fairly among tenants, then by priority class, then by due time.

    tenant     Deficit round robin over prompt tokens (Shreedhar and Varghese, "Efficient fair queueing using deficit
               round robin", SIGCOMM 1995). Tenants with waiting requests are visited one by one. In a turn, the
               tenant's credit grows by `QUANTUM_TOKENS` times its weight, and requests are served as long as the
               credit covers their prompt tokens. Unused credit is kept while the tenant has waiting requests.
    priority   Strict within a tenant: the most urgent class first. Clients choose the class, so it does not affect
               other tenants.
    request    The earliest due time first. If due times are equal, the earliest arrival first.

Between two turns of a tenant, every other tenant has at most one turn, regardless of the number and urgency of its
waiting requests. If prompts are long, every tenant may need several turns until its credit covers its first request.
Each tenant then gets the credit of several turns in one operation.

Adding and removing cost O(log n) for n waiting requests of the tenant. Finding the next request costs O(1) during a
turn, otherwise O(number of tenants). Does no I/O. It has no clock and does not wait. Implements `QueuePolicy`
(`orchestrator.admission.queue_policy`); owned by `orchestrator.admission.gate`.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Generic

from sortedcontainers import SortedKeyList

from orchestrator.admission.queue_policy import Totals, WaiterT
from orchestrator.requests.tenants import Tenant

QUANTUM_TOKENS = 128
"""Number of prompt tokens that are credited to a tenant of weight 1 in each turn."""


class _Flow(Generic[WaiterT]):
    """Waiting requests of one tenant, and its remaining credit."""

    def __init__(self, tenant: Tenant) -> None:
        self.totals = Totals()
        self.quantum = _quantum(tenant)
        self.deficit = self.quantum
        """Remaining credit: number of prompt tokens that may be served before the tenant's turn ends. The credit for a
        turn is added when the tenant's previous turn ends."""
        self._waiting: SortedKeyList = SortedKeyList(key=attrgetter("turn"))

    def __iter__(self) -> Iterator[WaiterT]:
        """Iterate over the requests in the order of service."""
        waiting: Iterator[WaiterT] = iter(self._waiting)
        return waiting

    @property
    def head(self) -> WaiterT:
        head: WaiterT = self._waiting[0]
        return head

    @property
    def last(self) -> WaiterT:
        last: WaiterT = self._waiting[-1]
        return last

    @property
    def share(self) -> float:
        """Return the number of turns that are needed to serve all waiting tokens of the tenant."""
        return self.totals.num_tokens / self.quantum

    @property
    def num_rounds(self) -> int:
        """Return the number of further turns that the tenant needs until its credit covers its first waiting request; 0
        if the credit already covers it."""
        return max(0, -(-(self.head.num_tokens - self.deficit) // self.quantum))

    def add(self, waiter: WaiterT) -> None:
        self._waiting.add(waiter)
        self.totals.add(waiter)

    def remove(self, waiter: WaiterT) -> None:
        self._waiting.remove(waiter)
        self.totals.add(waiter, -1)


class FairQueue(Generic[WaiterT]):
    """Fair queue policy: waiting requests by tenant, priority class and due time. Implements `QueuePolicy`."""

    def __init__(self) -> None:
        self._flows: OrderedDict[str, _Flow[WaiterT]] = OrderedDict()
        """Waiting requests by tenant, in the order of the tenants' turns. A new tenant is added at the end."""
        self._waiting: set[WaiterT] = set()
        self._num_issued = 0

    def add(self, waiter: WaiterT) -> None:
        """Add a request to the queue. If the request was in the queue before, it gets its old position among its
        tenant's requests."""
        assert waiter not in self._waiting, "a request is added twice"
        if not waiter.number:
            self._num_issued += 1
            waiter.number = self._num_issued
        self._waiting.add(waiter)
        flow = self._flows.get(waiter.tenant.name)
        if flow is None:
            flow = self._flows[waiter.tenant.name] = _Flow(waiter.tenant)
        flow.add(waiter)

    def remove(self, waiter: WaiterT, *, is_served: bool = False) -> None:
        """Remove a waiting request. If `is_served` is True, the request's prompt tokens are deducted from the tenant's
        credit. Raises KeyError if the request is not waiting."""
        self._waiting.remove(waiter)
        flow = self._flows[waiter.tenant.name]
        if is_served:
            assert waiter is flow.head and not flow.num_rounds, "a request is served before its turn"
            flow.deficit -= waiter.num_tokens
        flow.remove(waiter)
        if not flow.totals.num_requests:
            del self._flows[waiter.tenant.name]

    def head(self, may_run: Callable[[WaiterT], bool]) -> WaiterT | None:
        """Advance the tenants' turns until the first request of some tenant may be served, and return this request.
        Return None if no request may be served.

        A second call returns the same request unless something has changed. `may_run` returns False for a request that
        must still wait. A tenant whose first request must wait keeps its position and its credit. The tenant's less
        urgent requests are not served meanwhile, because they would use the slots for which the first request waits.
        """
        if not self._flows:
            return None
        first = next(iter(self._flows.values()))
        if not first.num_rounds and may_run(first.head):
            return first.head
        flows = {name: flow for name, flow in self._flows.items() if may_run(flow.head)}
        if not flows:
            return None
        num_rounds = min(flow.num_rounds for flow in flows.values())
        chosen = next(name for name, flow in flows.items() if flow.num_rounds == num_rounds)
        self._pass_on(flows, num_rounds, chosen)
        return flows[chosen].head

    def _pass_on(self, flows: dict[str, _Flow[WaiterT]], num_rounds: int, chosen: str) -> None:
        """End `num_rounds` turns of each tenant in `flows`, and one more turn of each tenant in it that precedes
        `chosen`."""
        before = list(self._flows)
        before = before[: before.index(chosen)]
        for flow in flows.values():
            flow.deficit += num_rounds * flow.quantum
        for name in before:
            if name in flows:
                flows[name].deficit += flows[name].quantum
            self._flows.move_to_end(name)

    def last(self, newcomer: WaiterT) -> WaiterT:
        """Return the request to remove when the queue is too full. Must be called after `newcomer` was added.

        The request belongs to the tenant with the most waiting tokens relative to its weight. If several tenants tie,
        and the newcomer's tenant is one of them, the newcomer's tenant is selected. Without this rule, two tenants
        would displace each other's requests forever. Of the tenant's requests, the least urgent one is returned. If
        several are equally urgent, the one with the latest due time is returned.
        """
        own = self._flows[newcomer.tenant.name]
        return max(self._flows.values(), key=lambda flow: (flow.share, flow is own)).last

    def before(self, waiter: WaiterT) -> tuple[float, int]:
        """Return `(all, own)`: the number of slots that other requests get before `waiter` is served. `all` counts the
        requests of all tenants, `own` only those of `waiter`'s tenant. `waiter` itself is not in the queue yet. It is
        assumed that no other request arrives.

        `own` is the number of slots of those requests of the tenant that are more urgent than `waiter`, or equally
        urgent and due no later. `all` is `own` plus an estimate for each other tenant. Let t be the number of turns in
        which `waiter`'s tenant serves `waiter` and the requests before it, and u the number of turns in which another
        tenant serves all of its waiting requests. The fraction min(1, t / u) of that tenant's waiting slots is counted.
        Costs O(n) for n waiting requests of `waiter`'s tenant.
        """
        own, mine = self._flows.get(waiter.tenant.name), Totals()
        for each in own or ():
            if (each.priority, each.due_s) > (waiter.priority, waiter.due_s):
                break
            mine.add(each)
        turns = (mine.num_tokens + waiter.num_tokens) / _quantum(waiter.tenant)
        others = [flow for flow in self._flows.values() if flow is not own]
        theirs = sum(flow.totals.num_slots * min(1.0, turns / flow.share) for flow in others)
        return mine.num_slots + theirs, mine.num_slots


def _quantum(tenant: Tenant) -> int:
    return max(1, round(QUANTUM_TOKENS * tenant.weight))
