"""Interface of a queue policy: the order in which waiting requests are served, and which of them is removed first.

`orchestrator.admission.gate` calls the policy and counts slots. `orchestrator.admission.fair_queue` is the policy in
use, selected in `orchestrator.composition`. A policy is pure: it has no clock and never waits.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from baton.types import Priority
from orchestrator.requests.tenants import DEFAULT_TENANT, Tenant


@dataclass(eq=False)
class Waiter:
    """Entry of one request in the queue."""

    num_tokens: int
    """Number of prompt tokens of the request (>= 1), which are charged to its tenant."""
    num_slots: int = 1
    tenant: Tenant = DEFAULT_TENANT
    priority: Priority = Priority.STANDARD
    due_s: float = 0.0
    """Due time on any clock. Among requests of the same tenant and class, the one due first is served first."""
    number: int = field(default=0, init=False)
    """Number in the order of arrival, starting at 1. Set by the policy."""

    @property
    def turn(self) -> tuple[Priority, float, int]:
        """Return the sort key for the order in which a tenant's requests are served."""
        return self.priority, self.due_s, self.number


WaiterT = TypeVar("WaiterT", bound=Waiter)


@dataclass
class Totals:
    """Totals over a set of waiting requests."""

    num_requests: int = 0
    num_tokens: int = 0
    num_slots: int = 0

    def add(self, waiter: Waiter, sign: int = 1) -> None:
        """Add a request to the totals; subtract it if `sign` is -1."""
        self.num_requests += sign
        self.num_tokens += sign * waiter.num_tokens
        self.num_slots += sign * waiter.num_slots


class QueuePolicy(Protocol[WaiterT]):
    """Stores the waiting requests in the order of service. The gate limits their number."""

    def add(self, waiter: WaiterT) -> None:
        """Add a request to the queue. A request that was removed and is added again gets its old position among its
        tenant's requests."""

    def remove(self, waiter: WaiterT, *, is_served: bool = False) -> None:
        """Remove a request. If `is_served`, it must be the one that `head` returned. Raises KeyError if it is not
        waiting."""

    def head(self, may_run: Callable[[WaiterT], bool]) -> WaiterT | None:
        """Return the next request among those for which `may_run` is True; None if there is none. The result stays the
        same until something changes."""

    def last(self, newcomer: WaiterT) -> WaiterT:
        """Return the request to remove when the queue is too full. To be called after `newcomer` was added."""

    def before(self, waiter: WaiterT) -> tuple[float, int]:
        """Return the number of slots that are given to other requests before `waiter`, which is not in the queue, if no
        further request arrives: over all tenants, and within its own tenant. The first number may be fractional,
        because it contains means over other tenants' requests."""
