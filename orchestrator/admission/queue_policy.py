"""Interface of a queue policy. A policy decides the order in which waiting requests are served, and which request is
removed when the queue is too full.

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
    """One request that waits in the queue, with the properties by which a policy orders requests."""

    num_tokens: int
    """Number of prompt tokens of the request, at least 1. They are charged to the request's tenant."""
    num_slots: int = 1
    tenant: Tenant = DEFAULT_TENANT
    priority: Priority = Priority.STANDARD
    due_s: float = 0.0
    """Due time in seconds, on any clock. Among requests of the same tenant and priority class, the request with the
    earliest due time is served first."""
    number: int = field(default=0, init=False)
    """Number of the request in the order of arrival, starting at 1. The policy sets it; 0 before."""

    @property
    def turn(self) -> tuple[Priority, float, int]:
        """Return the key by which a tenant's requests are sorted for service: priority class, due time, order of
        arrival."""
        return self.priority, self.due_s, self.number


WaiterT = TypeVar("WaiterT", bound=Waiter)


@dataclass
class Totals:
    """Numbers of requests, tokens and slots of a set of waiting requests."""

    num_requests: int = 0
    num_tokens: int = 0
    num_slots: int = 0

    def add(self, waiter: Waiter, sign: int = 1) -> None:
        """Add one request, its tokens and its slots to the totals. If `sign` is -1, subtract them instead."""
        self.num_requests += sign
        self.num_tokens += sign * waiter.num_tokens
        self.num_slots += sign * waiter.num_slots


class QueuePolicy(Protocol[WaiterT]):
    """Stores the waiting requests, and decides the order in which they are served. The gate limits their number."""

    def add(self, waiter: WaiterT) -> None:
        """Add a request to the queue. If the request was in the queue before, it gets its old position among its
        tenant's requests."""

    def remove(self, waiter: WaiterT, *, is_served: bool = False) -> None:
        """Remove a request from the queue. `is_served` is True if the request is served; it must then be the request
        that `head` returned. Raises KeyError if the request is not waiting."""

    def head(self, may_run: Callable[[WaiterT], bool]) -> WaiterT | None:
        """Return the next request to serve, among those for which `may_run` returns True; None if there is none.
        Repeated calls return the same request until something changes."""

    def last(self, newcomer: WaiterT) -> WaiterT:
        """Return the request to remove when the queue is too full. Must be called after `newcomer` was added."""

    def before(self, waiter: WaiterT) -> tuple[float, int]:
        """Return `(all, own)`: the number of slots that other requests get before `waiter` is served. `all` counts the
        requests of all tenants, `own` only those of `waiter`'s tenant. `waiter` itself is not in the queue yet. It is
        assumed that no other request arrives. `all` may be fractional, because the number for the other tenants may be
        an estimate."""
