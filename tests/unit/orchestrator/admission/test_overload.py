"""Admission over simulated time, asked for three times what can be served: who is taken is in time, nothing idles."""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import mean

import pytest

from baton.errors import ResourceExhaustedError
from baton.types import Priority
from orchestrator.admission.fair_queue import FairQueue
from orchestrator.admission.gate import Admission, Entry
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.tenants import Tenant
from tests.support.clusters.asked import asking
from tests.support.manual_clock import ManualClock

NUM_SLOTS = 8
SERVICE_S = 1.0
CAPACITY = NUM_SLOTS / SERVICE_S
SECONDS = 120.0
Service = Callable[[random.Random], float]
SERVICES: dict[str, Service] = {
    "alike": lambda rng: SERVICE_S,
    "mixed": lambda rng: rng.uniform(0.2, 1.8) * SERVICE_S,
    "random": lambda rng: rng.expovariate(1 / SERVICE_S),
}
LIGHT, OTHER = Tenant("light"), Tenant("other")


@dataclass
class Asked:
    """One request, and what became of it; None for what did not happen."""

    at_s: float
    entry: Entry
    end_s: float | None = None
    expired: bool = False

    @property
    def wait_s(self) -> float:
        assert self.entry.started_s is not None
        return self.entry.started_s - self.at_s


@dataclass
class Server:
    """Slots that keep each request for its service time; requests leave at their deadlines, wherever they are."""

    service: Service
    config: OrchestratorConfig
    clock: ManualClock = field(default_factory=lambda: ManualClock(1000.0))
    rng: random.Random = field(default_factory=lambda: random.Random(5))
    asked: list[Asked] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    """By tenant; those among them whose place in the queue was given away."""

    def __post_init__(self) -> None:
        self.admission = Admission(self.config, self.clock, FairQueue())
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._waiting: list[Asked] = []

    def load(
        self, rate: float, tenant: Tenant, patience_s: float | None, priority: Priority = Priority.STANDARD
    ) -> None:
        """Poisson arrivals for all of the time."""
        at_s = self.clock.now_s()
        while (at_s := at_s + self.rng.expovariate(rate)) < 1000.0 + SECONDS:
            self._at(at_s, partial(self._ask, tenant, patience_s, priority))

    def run(self) -> None:
        """To the end of the last request."""
        while self._events:
            at_s, _, happen = heapq.heappop(self._events)
            self.clock.advance(max(0.0, at_s - self.clock.now_s()))
            happen()
            for each in [each for each in self._waiting if each.entry.started_s is not None]:
                self._waiting.remove(each)
                self._at(self.clock.now_s() + self.service(self.rng), partial(self._end, each))

    def asked_by(self, tenant: Tenant) -> list[Asked]:
        """Its requests that ran."""
        return [each for each in self.asked if each.entry.tenant is tenant and each.entry.started_s is not None]

    def _at(self, at_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), happen))

    def _ask(self, tenant: Tenant, patience_s: float | None, priority: Priority) -> None:
        now_s = self.clock.now_s()
        deadline_s = None if patience_s is None else now_s + patience_s
        try:
            entry = self.admission.join(asking(100, tenant=tenant, deadline_s=deadline_s, priority=priority), SERVICE_S)
        except ResourceExhaustedError:
            self.refused[tenant.name] += 1
            return
        asked = Asked(now_s, entry)
        self.asked.append(asked)
        self._waiting.append(asked)
        if deadline_s is not None:
            self._at(deadline_s, partial(self._expire, asked))

    def _expire(self, asked: Asked) -> None:
        if asked.end_s is None:
            asked.expired = True
            self._waiting = [each for each in self._waiting if each is not asked]
            self.admission.leave(asked.entry)

    def _end(self, asked: Asked) -> None:
        if not asked.expired:
            asked.end_s = self.clock.now_s()
            self.admission.leave(asked.entry)


def overloaded(service: str, max_queued_requests: int = 256) -> Server:
    return Server(SERVICES[service], OrchestratorConfig(max_running=NUM_SLOTS, max_queued_requests=max_queued_requests))


def served_part(server: Server) -> float:
    """Requests that got all they asked for, of those that could have been served at most."""
    return sum(each.end_s is not None for each in server.asked) / (CAPACITY * SECONDS)


@pytest.mark.parametrize(("service", "in_time"), [("alike", 0.95), ("mixed", 0.95), ("random", 0.8)])
def test_who_is_taken_is_in_time_and_the_slots_are_busy(service: str, in_time: float) -> None:
    server = overloaded(service)
    server.load(3 * CAPACITY, OTHER, patience_s=5.0)
    server.run()
    assert mean(each.end_s is not None for each in server.asked) >= in_time  # of random ones, many take longer anyway
    assert served_part(server) >= 0.9
    assert server.refused.total() > CAPACITY * SECONDS


@pytest.mark.parametrize("service", ["alike", "mixed"])  # random ones take what they take
def test_without_deadlines_the_queue_s_bound_is_the_bound_on_waiting(service: str) -> None:
    server = overloaded(service, max_queued_requests=round(3 * CAPACITY))
    server.load(3 * CAPACITY, OTHER, patience_s=None)
    server.run()
    waits_s = sorted(each.wait_s for each in server.asked)
    assert 2.0 < waits_s[round(0.95 * len(waits_s)) - 1] <= 1.3 * 3.0
    assert served_part(server) >= 0.95


@pytest.mark.parametrize("service", SERVICES)
def test_a_light_tenant_is_never_refused_and_waits_for_a_turn_and_not_for_a_backlog(service: str) -> None:
    server = overloaded(service, max_queued_requests=round(3 * CAPACITY))
    server.load(CAPACITY / 10, LIGHT, patience_s=None)
    server.load(2 * CAPACITY, OTHER, patience_s=None)
    server.run()
    waits_s = {tenant: [each.wait_s for each in server.asked_by(tenant)] for tenant in (LIGHT, OTHER)}
    assert LIGHT.name not in server.refused
    assert mean(waits_s[OTHER]) > 2.0
    assert mean(waits_s[LIGHT]) < 0.5 * SERVICE_S  # slots come free once in SERVICE_S, all at once at worst


@pytest.mark.parametrize("service", SERVICES)
def test_beside_a_tenant_that_is_bounded_a_light_one_hardly_waits(service: str) -> None:
    server = overloaded(service, max_queued_requests=round(3 * CAPACITY))
    bounded = Tenant("bounded", max_running=NUM_SLOTS - 2)
    server.load(CAPACITY / 10, LIGHT, patience_s=None)
    server.load(2 * CAPACITY, bounded, patience_s=None)
    server.run()
    assert mean(each.wait_s for each in server.asked_by(LIGHT)) < 0.5 / CAPACITY
    assert served_part(server) >= 0.7


def test_a_flood_of_urgent_requests_of_a_light_tenant_takes_no_share_of_a_heavy_one() -> None:
    server = overloaded("alike", max_queued_requests=round(3 * CAPACITY))
    heavy, flood = Tenant("heavy", weight=10.0), Tenant("flood", weight=1.0)
    server.load(0.6 * CAPACITY, heavy, patience_s=None)
    server.load(200.0, flood, patience_s=None, priority=Priority.INTERACTIVE)
    server.run()
    assert heavy.name not in server.refused
    assert mean(each.wait_s for each in server.asked_by(heavy)) < SERVICE_S
    assert served_part(server) >= 0.9  # the flood has the rest
