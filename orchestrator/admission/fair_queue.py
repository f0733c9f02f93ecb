"""Decides which waiting request is next: fairly among tenants, then by priority class, then by due time.

    tenant     deficit round robin over prompt tokens (Shreedhar and Varghese, "Efficient fair queueing using deficit
               round robin", SIGCOMM 1995): tenants with waiting requests are visited one after another; a visited
               tenant may have `QUANTUM_TOKENS` times its weight served, and keeps unused credit while it still waits
    priority   strict within a tenant: its most urgent class first. Clients choose the class, so it takes nothing from
               other tenants
    request    the one due first, of equals the one that came first

A tenant waits for at most one such turn of each other tenant, however much these have waiting, and however urgent.
Rounds in which no request could be served, because prompts are longer than a turn, are counted and credited at once.
Joining and leaving cost O(log n) of the requests that a tenant has waiting; to find the next one costs O(1) as long as
its tenant's turn lasts, else O(tenants). Pure: no clock, no waiting. A `QueuePolicy`
(`orchestrator.admission.queue_policy`), owned by `orchestrator.admission.gate`.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Generic

from sortedcontainers import SortedKeyList

from orchestrator.admission.queue_policy import Totals, WaiterT
from orchestrator.requests.tenants import Tenant

QUANTUM_TOKENS = 128
"""Prompt tokens that one turn of a tenant of weight 1 serves."""


class _Flow(Generic[WaiterT]):
    """One tenant's waiting requests, and the credit left of its turn."""

    def __init__(self, tenant: Tenant) -> None:
        self.totals = Totals()
        self.quantum = _quantum(tenant)
        self.deficit = self.quantum
        """Tokens that may be served before the tenant's turn is over. A turn's credit is given when the turn before it
        ends, so that the order of turns needs no further state."""
        self._waiting: SortedKeyList = SortedKeyList(key=attrgetter("turn"))

    def __iter__(self) -> Iterator[WaiterT]:
        """Iterate over the requests in the order in which they are served."""
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
        """Return how many of the tenant's turns its waiting tokens are worth."""
        return self.totals.num_tokens / self.quantum

    @property
    def num_rounds(self) -> int:
        """Return the number of further turns that the tenant needs before its first request may be served."""
        return max(0, -(-(self.head.num_tokens - self.deficit) // self.quantum))

    def add(self, waiter: WaiterT) -> None:
        self._waiting.add(waiter)
        self.totals.add(waiter)

    def remove(self, waiter: WaiterT) -> None:
        self._waiting.remove(waiter)
        self.totals.add(waiter, -1)


class FairQueue(Generic[WaiterT]):
    """The fair policy: waiting requests by tenant, class and due time. Implements `QueuePolicy`."""

    def __init__(self) -> None:
        self._flows: OrderedDict[str, _Flow[WaiterT]] = OrderedDict()
        """Waiting requests by tenant, the one whose turn it is first; a tenant joins at the end."""
        self._waiting: set[WaiterT] = set()
        self._num_issued = 0

    def add(self, waiter: WaiterT) -> None:
        """Queue a request; one that is added again after leaving returns to its old place in its tenant's line."""
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
        """Take a waiting request out, charging its tenant if `is_served`. Raises KeyError when it does not wait."""
        self._waiting.remove(waiter)
        flow = self._flows[waiter.tenant.name]
        if is_served:
            assert waiter is flow.head and not flow.num_rounds, "a request is served before its turn"
            flow.deficit -= waiter.num_tokens
        flow.remove(waiter)
        if not flow.totals.num_requests:
            del self._flows[waiter.tenant.name]

    def head(self, may_run: Callable[[WaiterT], bool]) -> WaiterT | None:
        """Pass turns on until a tenant's first request may be served, and return it; None when no request may.

        A second call returns the same request unless something has changed. A tenant whose first request may not run
        keeps its place and its credit, and gets no less urgent one served: that would take the slots for which the
        first one waits.
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
        """End `num_rounds` turns of each of `flows`, and one more turn of each that comes before the chosen one."""
        before = list(self._flows)
        before = before[: before.index(chosen)]
        for flow in flows.values():
            flow.deficit += num_rounds * flow.quantum
        for name in before:
            if name in flows:
                flows[name].deficit += flows[name].quantum
            self._flows.move_to_end(name)

    def last(self, newcomer: WaiterT) -> WaiterT:
        """Return the request to give up when not all can wait, after `newcomer` was added.

        It is of the tenant that has most tokens waiting for its weight: the least urgent one, of equals the one due
        last. Of tenants that have equally much waiting it is the newcomer's; otherwise two tenants would push each
        other out for ever.
        """
        own = self._flows[newcomer.tenant.name]
        return max(self._flows.values(), key=lambda flow: (flow.share, flow is own)).last

    def before(self, waiter: WaiterT) -> tuple[float, int]:
        """Return the slots that are served before a request that does not wait yet, if no other request comes: over all
        tenants, and of its own tenant.

        Counts those of its own tenant that are more urgent, or as urgent and due before it, and of each other tenant,
        at its mean number of slots per token, as much as its weight allows in the meantime. O(n) of its tenant's
        requests.
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
