"""The port of a queue's policy: in which order waiting requests are served, and which of them has the worst claim.

`orchestrator.admission.gate` calls a policy and counts slots; `orchestrator.admission.fair_queue` is the policy in use,
chosen in `orchestrator.composition`. A policy is pure: it knows no clock, and never waits.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from baton.types import Priority
from orchestrator.requests.tenants import DEFAULT_TENANT, Tenant


@dataclass(eq=False)
class Waiter:
    """One request's place in the queue."""

    num_tokens: int
    """Tokens of the request's prompt (>= 1), with which its tenant pays."""
    num_slots: int = 1
    tenant: Tenant = DEFAULT_TENANT
    priority: Priority = Priority.STANDARD
    due_s: float = 0.0
    """Due time on any clock: of a tenant's requests in a class, the one due first is served first."""
    number: int = field(default=0, init=False)
    """Number in the order of arrival, from 1; given by the policy."""

    @property
    def turn(self) -> tuple[Priority, float, int]:
        """Return the sort key by which a tenant's requests are served."""
        return self.priority, self.due_s, self.number


WaiterT = TypeVar("WaiterT", bound=Waiter)


@dataclass
class Totals:
    """Totals over a set of waiting requests."""

    num_requests: int = 0
    num_tokens: int = 0
    num_slots: int = 0

    def add(self, waiter: Waiter, sign: int = 1) -> None:
        """Count a request in; with `sign` -1, count it out."""
        self.num_requests += sign
        self.num_tokens += sign * waiter.num_tokens
        self.num_slots += sign * waiter.num_slots


class QueuePolicy(Protocol[WaiterT]):
    """Holds the waiting requests in the order in which they are to be served. The gate bounds their number."""

    def add(self, waiter: WaiterT) -> None:
        """Queue a request; one that is added again after leaving returns to its old place in its tenant's line."""

    def remove(self, waiter: WaiterT, *, is_served: bool = False) -> None:
        """Take a request out, if `is_served` the one that `head` returned. Raises KeyError when it does not wait."""

    def head(self, may_run: Callable[[WaiterT], bool]) -> WaiterT | None:
        """Return the next request of those that `may_run` now, the same until something changes; None without one."""

    def last(self, newcomer: WaiterT) -> WaiterT:
        """Return the request to give up when not all can wait, after `newcomer` was added."""

    def before(self, waiter: WaiterT) -> tuple[float, int]:
        """Return the slots that are served before a request that does not wait yet, if no other request comes: over all
        tenants, and of its own tenant. The former is fractional, because other tenants' share of it is a mean."""
