"""Decides which waiting request is next: by priority class, then fairly among tenants, then by due time.

    priority   strict: no request of a class is next while one of a more urgent class could run
    tenant     deficit round robin over prompt tokens (Shreedhar and Varghese, "Efficient fair queueing using deficit
               round robin", SIGCOMM 1995): each tenant that has something waiting is visited in turn, may have as many
               tokens served as its weight says, and keeps unused credit for its next turn
    request    the one due first, of equals the one that came first

A tenant's turn is worth `QUANTUM_TOKENS` times its weight, so a tenant waits for at most one such turn of each other
tenant, however much these have waiting. Many prompts are longer than a turn: instead of visiting all tenants again and
again until one fits, rounds in which no request could be served are counted and credited at once. A tenant without
waiting requests keeps no credit: unused turns cannot be saved up.

Joining and leaving cost O(log n) of the requests that a tenant has waiting in a class; to find the next one costs O(1)
as long as its tenant's turn lasts, else O(tenants). Pure: no clock, no waiting. Owned by `orchestrator.admission.gate`.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sortedcontainers import SortedKeyList

from baton.types import Priority
from orchestrator.requests.tenants import DEFAULT_TENANT, Tenant

QUANTUM_TOKENS = 128
"""Prompt tokens that one turn of a tenant of weight 1 serves."""


@dataclass(eq=False)
class Ticket:
    """One request's place in the queue."""

    num_tokens: int
    """Tokens of the request's prompt (>= 1), with which its tenant pays."""
    num_slots: int = 1
    tenant: Tenant = DEFAULT_TENANT
    priority: Priority = Priority.STANDARD
    due_s: float = 0.0
    """Due time on any clock: of a tenant's requests in a class, the one due first is served first."""
    number: int = field(default=0, init=False)
    """Number in the order of arrival, from 1; given by the queue."""

    @property
    def turn(self) -> tuple[float, int]:
        """Return the sort key by which a tenant's requests of a class are served."""
        return self.due_s, self.number


TicketT = TypeVar("TicketT", bound=Ticket)


@dataclass
class Load:
    """Totals over a set of tickets."""

    num_requests: int = 0
    num_tokens: int = 0
    num_slots: int = 0

    def add(self, ticket: Ticket, sign: int = 1) -> None:
        """Count a ticket in; with `sign` -1, count it out."""
        self.num_requests += sign
        self.num_tokens += sign * ticket.num_tokens
        self.num_slots += sign * ticket.num_slots


@dataclass(frozen=True)
class Before:
    """Slots of the requests that are served before a given one."""

    num_slots: float
    """Slots over all tenants; not a whole number, because other tenants' share of it is a mean."""
    num_own_slots: int
    """Slots of the given request's own tenant."""


class _Flow(Generic[TicketT]):
    """One tenant's waiting requests in one class, and the credit left of its turn."""

    def __init__(self, tenant: Tenant) -> None:
        self.load = Load()
        self.quantum = _quantum(tenant)
        self.deficit = self.quantum
        """Tokens that may be served before the tenant's turn is over. A turn's credit is given when the turn before it
        ends, so that the order of turns needs no further state."""
        self._waiting: SortedKeyList = SortedKeyList(key=_turn_of)

    def __iter__(self) -> Iterator[TicketT]:
        """Iterate over the tickets in the order in which they are served."""
        waiting: Iterator[TicketT] = iter(self._waiting)
        return waiting

    @property
    def head(self) -> TicketT:
        head: TicketT = self._waiting[0]
        return head

    @property
    def last(self) -> TicketT:
        last: TicketT = self._waiting[-1]
        return last

    @property
    def share(self) -> float:
        """Return how many of the tenant's turns its waiting tokens are worth."""
        return self.load.num_tokens / self.quantum

    @property
    def num_rounds(self) -> int:
        """Return the number of further turns that the tenant needs before its first ticket may be served."""
        return max(0, -(-(self.head.num_tokens - self.deficit) // self.quantum))

    def add(self, ticket: TicketT) -> None:
        self._waiting.add(ticket)
        self.load.add(ticket)

    def remove(self, ticket: TicketT) -> None:
        self._waiting.remove(ticket)
        self.load.add(ticket, -1)


class _Ring(Generic[TicketT]):
    """One class: the tenants that have requests waiting in it, the one whose turn it is first."""

    def __init__(self) -> None:
        self.load = Load()
        self.flows: OrderedDict[str, _Flow[TicketT]] = OrderedDict()
        """Waiting requests by tenant; a tenant joins at the end."""

    def add(self, ticket: TicketT) -> None:
        self.load.add(ticket)
        flow = self.flows.get(ticket.tenant.name)
        if flow is None:
            flow = self.flows[ticket.tenant.name] = _Flow(ticket.tenant)
        flow.add(ticket)

    def remove(self, ticket: TicketT) -> None:
        flow = self.flows[ticket.tenant.name]
        flow.remove(ticket)
        self.load.add(ticket, -1)
        if not flow.load.num_requests:
            del self.flows[ticket.tenant.name]

    def head(self, may_run: Callable[[TicketT], bool], blocked: Collection[str]) -> TicketT | None:
        """Pass turns on until a tenant's first ticket may be served, and return that ticket; None when no ticket may.

        Tenants that are blocked, or whose first ticket may not run, keep their place and their credit.
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

    def _pass_on(self, flows: dict[str, _Flow[TicketT]], num_rounds: int, chosen: str) -> None:
        """End `num_rounds` turns of each of `flows`, and one more turn of each that comes before the chosen one."""
        before = list(self.flows)
        before = before[: before.index(chosen)]
        for flow in flows.values():
            flow.deficit += num_rounds * flow.quantum
        for name in before:
            if name in flows:
                flows[name].deficit += flows[name].quantum
            self.flows.move_to_end(name)

    def last(self, newcomer: TicketT) -> TicketT:
        """Return the last ticket of the tenant with most tokens waiting for its weight; of equals, the newcomer's
        tenant."""
        own = self.flows.get(newcomer.tenant.name)
        return max(self.flows.values(), key=lambda flow: (flow.share, flow is own)).last

    def before(self, ticket: TicketT) -> Before:
        """Return the slots that are served before a ticket within this class, as `FairQueue.before` counts them."""
        own, mine = self.flows.get(ticket.tenant.name), Load()
        for each in own or ():
            if each.due_s > ticket.due_s:
                break
            mine.add(each)
        turns = (mine.num_tokens + ticket.num_tokens) / _quantum(ticket.tenant)
        others = [flow for flow in self.flows.values() if flow is not own]
        theirs = sum(flow.load.num_slots * min(1.0, turns / flow.share) for flow in others)
        return Before(mine.num_slots + theirs, mine.num_slots)


class FairQueue(Generic[TicketT]):
    """Waiting tickets in the order in which they are to be served. The caller bounds their number."""

    def __init__(self) -> None:
        self.load = Load()
        """Totals over all waiting tickets."""
        self._rings: dict[Priority, _Ring[TicketT]] = {priority: _Ring() for priority in Priority}
        self._of_tenant: dict[str, Load] = {}
        self._waiting: set[TicketT] = set()
        self._num_issued = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, ticket: TicketT) -> bool:
        return ticket in self._waiting

    def load_of(self, tenant: str) -> Load:
        """Return a tenant's totals over all classes. The result must not be changed."""
        return self._of_tenant.get(tenant, Load())

    def add(self, ticket: TicketT) -> None:
        """Queue a ticket; one that is added again after leaving returns to its old place among its tenant's tickets."""
        assert ticket not in self._waiting, "a ticket is added twice"
        if not ticket.number:
            self._num_issued += 1
            ticket.number = self._num_issued
        self._waiting.add(ticket)
        self._rings[ticket.priority].add(ticket)
        self._of_tenant.setdefault(ticket.tenant.name, Load()).add(ticket)
        self.load.add(ticket)

    def remove(self, ticket: TicketT) -> None:
        """Take a waiting ticket out, at no cost to its tenant. Raises KeyError when it does not wait."""
        self._waiting.remove(ticket)
        self._rings[ticket.priority].remove(ticket)
        self.load.add(ticket, -1)
        left = self._of_tenant[ticket.tenant.name]
        left.add(ticket, -1)
        if not left.num_requests:
            del self._of_tenant[ticket.tenant.name]

    def head(self, may_run: Callable[[TicketT], bool]) -> TicketT | None:
        """Return the next ticket of those that `may_run` now; None when there is none.

        A second call returns the same ticket unless something has changed. A tenant whose more urgent request may not
        run gets no less urgent one served: that would take the slots for which the urgent one waits.
        """
        blocked: set[str] = set()
        for ring in self._rings.values():
            head = ring.head(may_run, blocked)
            if head is not None:
                return head
            blocked |= ring.flows.keys()
        return None

    def take(self, ticket: TicketT) -> None:
        """Remove the ticket that `head` returned because it is served, and charge its tokens to its tenant."""
        flow = self._rings[ticket.priority].flows[ticket.tenant.name]
        assert ticket is flow.head and not flow.num_rounds, "a ticket is taken before its turn"
        flow.deficit -= ticket.num_tokens
        self.remove(ticket)

    def last(self, newcomer: TicketT) -> TicketT:
        """Return the ticket to give up when not all can wait, after `newcomer` was added.

        It is of the least urgent class, of the tenant that has most tokens waiting there for its weight, the one due
        last. Of tenants that have equally much waiting it is the newcomer's; otherwise two tenants would push each
        other out for ever.
        """
        ring = next(ring for ring in reversed(self._rings.values()) if ring.flows)
        return ring.last(newcomer)

    def before(self, ticket: TicketT) -> Before:
        """Return the slots that are served before a ticket that does not wait yet, if no other request comes.

        Counts all requests of more urgent classes, those of its own tenant that are due before it, and of each other
        tenant, at its mean number of slots per token, as much as its weight allows in the meantime. O(n) of its
        tenant's requests.
        """
        alike = self._rings[ticket.priority].before(ticket)
        num_slots, num_own_slots = alike.num_slots, alike.num_own_slots
        for priority in self._rings:
            if priority < ticket.priority:
                num_slots += self._rings[priority].load.num_slots
                own = self._rings[priority].flows.get(ticket.tenant.name)
                num_own_slots += own.load.num_slots if own is not None else 0
        return Before(num_slots, num_own_slots)


def _quantum(tenant: Tenant) -> int:
    return max(1, round(QUANTUM_TOKENS * tenant.weight))


def _turn_of(ticket: Ticket) -> tuple[float, int]:
    return ticket.turn
