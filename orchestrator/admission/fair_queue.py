"""Decides which waiting request is next: by priority class, then fairly among tenants, then by due time.

    priority   strict: no request of a class is next while one of a more urgent class could run
    tenant     deficit round robin over prompt tokens (Shreedhar and Varghese, "Efficient fair queueing using deficit
               round robin", SIGCOMM 1995): each tenant that has something waiting is visited in turn, may have
               `QUANTUM_TOKENS` times its weight served, and keeps unused credit for its next turn, if it still waits
    request    the one due first, of equals the one that came first

A tenant waits for at most one such turn of each other tenant, however much these have waiting. Rounds in which no
request could be served, because prompts are longer than a turn, are counted and credited at once.
Joining and leaving cost O(log n) of the requests that a tenant has waiting in a class; to find the next one costs O(1)
as long as its tenant's turn lasts, else O(tenants). Pure: no clock, no waiting. A `QueuePolicy`
(`orchestrator.admission.queue_policy`), owned by `orchestrator.admission.gate`.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from typing import Generic

from sortedcontainers import SortedKeyList

from baton.types import Priority
from orchestrator.admission.queue_policy import Before, Totals, Waiter, WaiterT
from orchestrator.requests.tenants import Tenant

QUANTUM_TOKENS = 128
"""Prompt tokens that one turn of a tenant of weight 1 serves."""


class _Flow(Generic[WaiterT]):
    """One tenant's waiting requests in one class, and the credit left of its turn."""

    def __init__(self, tenant: Tenant) -> None:
        self.totals = Totals()
        self.quantum = _quantum(tenant)
        self.deficit = self.quantum
        """Tokens that may be served before the tenant's turn is over. A turn's credit is given when the turn before it
        ends, so that the order of turns needs no further state."""
        self._waiting: SortedKeyList = SortedKeyList(key=_turn_of)

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


class _Ring(Generic[WaiterT]):
    """One class: the tenants that have requests waiting in it, the one whose turn it is first."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.flows: OrderedDict[str, _Flow[WaiterT]] = OrderedDict()
        """Waiting requests by tenant; a tenant joins at the end."""

    def add(self, waiter: WaiterT) -> None:
        self.totals.add(waiter)
        flow = self.flows.get(waiter.tenant.name)
        if flow is None:
            flow = self.flows[waiter.tenant.name] = _Flow(waiter.tenant)
        flow.add(waiter)

    def remove(self, waiter: WaiterT) -> None:
        flow = self.flows[waiter.tenant.name]
        flow.remove(waiter)
        self.totals.add(waiter, -1)
        if not flow.totals.num_requests:
            del self.flows[waiter.tenant.name]

    def head(self, may_run: Callable[[WaiterT], bool], blocked: Collection[str]) -> WaiterT | None:
        """Pass turns on until a tenant's first request may be served, and return it; None when no request may.

        Tenants that are blocked, or whose first request may not run, keep their place and their credit.
        """
        if not self.flows:
            return None
        name, first = next(iter(self.flows.items()))
        if not first.num_rounds and name not in blocked and may_run(first.head):
            return first.head
        flows = {name: flow for name, flow in self.flows.items() if name not in blocked and may_run(flow.head)}
        if not flows:
            return None
        num_rounds = min(flow.num_rounds for flow in flows.values())
        chosen = next(name for name, flow in flows.items() if flow.num_rounds == num_rounds)
        self._pass_on(flows, num_rounds, chosen)
        return flows[chosen].head

    def _pass_on(self, flows: dict[str, _Flow[WaiterT]], num_rounds: int, chosen: str) -> None:
        """End `num_rounds` turns of each of `flows`, and one more turn of each that comes before the chosen one."""
        before = list(self.flows)
        before = before[: before.index(chosen)]
        for flow in flows.values():
            flow.deficit += num_rounds * flow.quantum
        for name in before:
            if name in flows:
                flows[name].deficit += flows[name].quantum
            self.flows.move_to_end(name)

    def last(self, newcomer: WaiterT) -> WaiterT:
        """Return the last request of the tenant with most tokens waiting for its weight; of equals, the newcomer's."""
        own = self.flows.get(newcomer.tenant.name)
        return max(self.flows.values(), key=lambda flow: (flow.share, flow is own)).last

    def before(self, waiter: WaiterT) -> Before:
        """Return the slots that are served before a request within this class, as `FairQueue.before` counts them."""
        own, mine = self.flows.get(waiter.tenant.name), Totals()
        for each in own or ():
            if each.due_s > waiter.due_s:
                break
            mine.add(each)
        turns = (mine.num_tokens + waiter.num_tokens) / _quantum(waiter.tenant)
        others = [flow for flow in self.flows.values() if flow is not own]
        theirs = sum(flow.totals.num_slots * min(1.0, turns / flow.share) for flow in others)
        return Before(mine.num_slots + theirs, mine.num_slots)


class FairQueue(Generic[WaiterT]):
    """The fair policy: waiting requests by class, tenant and due time. Implements `QueuePolicy`."""

    def __init__(self) -> None:
        self._rings: dict[Priority, _Ring[WaiterT]] = {priority: _Ring() for priority in Priority}
        self._waiting: set[WaiterT] = set()
        self._num_issued = 0

    def add(self, waiter: WaiterT) -> None:
        """Queue a request; one that is added again after leaving returns to its old place in its tenant's line."""
        assert waiter not in self._waiting, "a request is added twice"
        if not waiter.number:
            self._num_issued += 1
            waiter.number = self._num_issued
        self._waiting.add(waiter)
        self._rings[waiter.priority].add(waiter)

    def remove(self, waiter: WaiterT, *, is_served: bool = False) -> None:
        """Take a waiting request out, charging its tenant if `is_served`. Raises KeyError when it does not wait."""
        self._waiting.remove(waiter)
        ring = self._rings[waiter.priority]
        if is_served:
            flow = ring.flows[waiter.tenant.name]
            assert waiter is flow.head and not flow.num_rounds, "a request is served before its turn"
            flow.deficit -= waiter.num_tokens
        ring.remove(waiter)

    def head(self, may_run: Callable[[WaiterT], bool]) -> WaiterT | None:
        """Return the next request of those that `may_run` now; None when there is none.

        A second call returns the same request unless something has changed. A tenant whose more urgent request may not
        run gets no less urgent one served: that would take the slots for which the urgent one waits.
        """
        blocked: set[str] = set()
        for ring in self._rings.values():
            head = ring.head(may_run, blocked)
            if head is not None:
                return head
            blocked |= ring.flows.keys()
        return None

    def last(self, newcomer: WaiterT) -> WaiterT:
        """Return the request to give up when not all can wait, after `newcomer` was added.

        It is of the least urgent class, of the tenant that has most tokens waiting there for its weight, the one due
        last. Of tenants that have equally much waiting it is the newcomer's; otherwise two tenants would push each
        other out for ever.
        """
        ring = next(ring for ring in reversed(self._rings.values()) if ring.flows)
        return ring.last(newcomer)

    def before(self, waiter: WaiterT) -> Before:
        """Return the slots that are served before a request that does not wait yet, if no other request comes.

        Counts all requests of more urgent classes, those of its own tenant that are due before it, and of each other
        tenant, at its mean number of slots per token, as much as its weight allows in the meantime. O(n) of its
        tenant's requests.
        """
        alike = self._rings[waiter.priority].before(waiter)
        num_slots, num_own_slots = alike.num_slots, alike.num_own_slots
        for priority in self._rings:
            if priority < waiter.priority:
                num_slots += self._rings[priority].totals.num_slots
                own = self._rings[priority].flows.get(waiter.tenant.name)
                num_own_slots += own.totals.num_slots if own is not None else 0
        return Before(num_slots, num_own_slots)


def _quantum(tenant: Tenant) -> int:
    return max(1, round(QUANTUM_TOKENS * tenant.weight))


def _turn_of(waiter: Waiter) -> tuple[float, int]:
    return waiter.turn
