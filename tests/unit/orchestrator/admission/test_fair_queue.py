"""Order of service, against lists that are sorted anew each time; shares by weight; nobody behind another's backlog."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from hypothesis.strategies import DataObject, data, integers, lists, sampled_from, sets

from baton.types import Priority
from orchestrator.admission.fair_queue import QUANTUM_TOKENS, FairQueue
from orchestrator.admission.queue_policy import QueuePolicy, Waiter
from orchestrator.requests.tenants import Tenant

TENANTS = (Tenant("a"), Tenant("b", weight=3.0), Tenant("c", weight=0.1))
A, B, C = TENANTS
FLOWS = [(priority, tenant.name) for priority in Priority for tenant in TENANTS]
Queue = QueuePolicy[Waiter]


@pytest.fixture
def queue() -> Queue:
    return FairQueue()


def anybody(waiter: Waiter) -> bool:
    return True


def add(queue: Queue, tenant: Tenant, *sizes: int, priority: Priority = Priority.STANDARD) -> list[Waiter]:
    waiters = [Waiter(size, tenant=tenant, priority=priority) for size in sizes]
    for waiter in waiters:
        queue.add(waiter)
    return waiters


def sizes(rng: random.Random, num: int) -> list[int]:
    return [rng.randint(1, 2000) for _ in range(num)]


def served(queue: Queue, num: int, may_run: Callable[[Waiter], bool] = anybody) -> list[Waiter]:
    """The next so many, as long as there are any."""
    found: list[Waiter] = []
    while len(found) < num and (head := queue.head(may_run)) is not None:
        queue.remove(head, is_served=True)
        found.append(head)
    return found


def test_of_a_tenants_requests_the_one_due_first_comes_first_then_the_one_that_came_first(queue: Queue) -> None:
    waiters = [Waiter(10, due_s=due_s) for due_s in (5.0, 9.0, 5.0, 1.0)]
    for waiter in waiters:
        queue.add(waiter)
    assert served(queue, 9) == [waiters[3], waiters[0], waiters[2], waiters[1]]


def test_a_more_urgent_class_is_served_first_within_its_tenant_alone(queue: Queue) -> None:
    batch = add(queue, A, QUANTUM_TOKENS, QUANTUM_TOKENS, priority=Priority.BATCH)
    standard = add(queue, A, QUANTUM_TOKENS)
    urgent = add(queue, C, *[10] * 3, priority=Priority.INTERACTIVE)  # c has a tenth of a's weight
    interactive = add(queue, A, QUANTUM_TOKENS, priority=Priority.INTERACTIVE)
    assert served(queue, 9) == [*interactive, urgent[0], *standard, urgent[1], batch[0], urgent[2], batch[1]]


def test_a_light_tenant_is_not_behind_a_heavy_ones_backlog(queue: Queue) -> None:
    add(queue, A, *[256] * 200)
    served(queue, 10)
    [light] = add(queue, Tenant("light"), 256)
    assert light in served(queue, 2)


def test_nobody_waits_for_more_than_a_turn_of_each_other_tenant(queue: Queue) -> None:
    add(queue, A, *[6000] * 50)
    served(queue, 3)
    [long] = add(queue, Tenant("light"), 6000)
    [short] = add(queue, Tenant("lighter"), 100)
    order = served(queue, 4)
    assert short in order[:2]
    assert long in order


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 3.0), (0.2, 5.0)])
def test_served_tokens_converge_to_weights(weights: tuple[float, float]) -> None:
    rng, queue = random.Random(7), FairQueue[Waiter]()
    tenants = [Tenant(f"t-{index}", weight=weight) for index, weight in enumerate(weights)]
    left = Counter(each.tenant for tenant in tenants for each in add(queue, tenant, *sizes(rng, 400)))
    tokens = dict.fromkeys(tenants, 0)
    while all(left.values()):
        [waiter] = served(queue, 1)
        tokens[waiter.tenant] += waiter.num_tokens
        left[waiter.tenant] -= 1
    by_weight = [tokens[tenant] / tenant.weight for tenant in tenants]
    one_turn = QUANTUM_TOKENS + 2000 / min(weights)  # Shreedhar and Varghese, lemma 2: a turn and the longest prompt
    assert abs(by_weight[0] - by_weight[1]) <= 2 * one_turn
    assert min(by_weight) > 4 * one_turn  # so the bound above says something


def test_who_had_nothing_waiting_has_saved_nothing(queue: Queue) -> None:
    add(queue, A, *[QUANTUM_TOKENS] * 40)
    served(queue, 30)
    add(queue, B, *[QUANTUM_TOKENS] * 10)
    assert [waiter.tenant for waiter in served(queue, 6)] == [B, B, B, A, B, B]


def test_a_tenant_that_may_not_run_keeps_its_place_and_nobody_waits_for_it(queue: Queue) -> None:
    mine = add(queue, A, *[QUANTUM_TOKENS] * 3)
    theirs = add(queue, C, 10, 10)
    assert served(queue, 9, lambda waiter: waiter.tenant is not A) == theirs
    assert queue.head(lambda waiter: waiter.tenant is not A) is None
    assert served(queue, 9) == mine


def test_less_urgent_requests_of_a_tenant_wait_with_its_urgent_one_that_may_not_run(queue: Queue) -> None:
    [urgent] = add(queue, A, 10, priority=Priority.INTERACTIVE)
    [later] = add(queue, A, 10, priority=Priority.BATCH)
    [other] = add(queue, B, 10, priority=Priority.BATCH)
    assert served(queue, 9, lambda waiter: waiter is not urgent) == [other]
    assert served(queue, 9) == [urgent, later]


def test_the_worst_claim_is_of_the_tenant_with_most_tokens_for_its_weight_then_least_urgent_then_due_last(
    queue: Queue,
) -> None:
    batch = add(queue, B, 500, priority=Priority.BATCH)  # b has a weight of 3
    first, last = add(queue, A, 100, 100, priority=Priority.INTERACTIVE)
    assert queue.last(batch[0]) is last
    queue.remove(last)
    [light] = add(queue, B, 400)
    assert queue.last(light) is batch[0]
    queue.remove(batch[0])
    queue.remove(light)
    [newcomer] = add(queue, Tenant("d"), 100)
    assert queue.last(newcomer) is newcomer  # has 100 for its weight, as a has: equals would displace each other
    assert queue.last(first) is first


def test_who_is_before_a_newcomer_by_hand(queue: Queue) -> None:
    for waiter in (
        Waiter(100, num_slots=2, tenant=A, priority=Priority.INTERACTIVE, due_s=3.0),
        Waiter(100, num_slots=4, tenant=A, due_s=1.0),
        Waiter(100, num_slots=8, tenant=A, due_s=3.0),
        Waiter(100, num_slots=16, tenant=A, priority=Priority.BATCH),
        Waiter(3000, num_slots=10, tenant=B),
        Waiter(600, num_slots=14, tenant=B, priority=Priority.INTERACTIVE),
    ):
        queue.add(waiter)
    num_before, num_own_before = queue.before(Waiter(400, tenant=A, due_s=2.0))
    # 2 of a more urgent class, 4 due before; while a gets 600 tokens b, of weight 3, gets 1,800 of its 3,600
    assert num_before == pytest.approx(2 + 4 + 12)
    assert num_own_before == 6


def test_a_waiter_that_does_not_wait_cannot_leave(queue: Queue) -> None:
    with pytest.raises(KeyError):
        queue.remove(Waiter(1))


Stopped = set[tuple[Priority, str]]
"""Of whom nothing may run."""


@dataclass
class Reference:
    """The same order, by lists: sorted anew each time, turns passed on one by one."""

    waiting: list[Waiter] = field(default_factory=list)
    ring: list[str] = field(default_factory=list)
    deficits: dict[str, int] = field(default_factory=dict)

    def flow(self, name: str) -> list[Waiter]:
        own = [each for each in self.waiting if each.tenant.name == name]
        return sorted(own, key=lambda each: (each.priority, each.due_s, each.number))

    def add(self, waiter: Waiter) -> None:
        self.waiting.append(waiter)
        if waiter.tenant.name not in self.ring:
            self.ring.append(waiter.tenant.name)
            self.deficits[waiter.tenant.name] = quantum(waiter.tenant)

    def remove(self, waiter: Waiter) -> None:
        self.waiting.remove(waiter)
        if not self.flow(waiter.tenant.name):
            self.ring.remove(waiter.tenant.name)

    def head(self, stopped: Stopped) -> Waiter | None:
        heads = {name: self.flow(name)[0] for name in self.ring}
        able = {name for name, head in heads.items() if (head.priority, name) not in stopped}
        while able:
            name = self.ring[0]
            if name in able:
                if heads[name].num_tokens <= self.deficits[name]:
                    return heads[name]
                self.deficits[name] += quantum(heads[name].tenant)
            self.ring.append(self.ring.pop(0))
        return None

    def last(self, newcomer: Waiter) -> Waiter:
        def claim(name: str) -> tuple[float, bool]:
            flow = self.flow(name)
            return sum(each.num_tokens for each in flow) / quantum(flow[0].tenant), name == newcomer.tenant.name

        return self.flow(max(self.ring, key=claim))[-1]


def quantum(tenant: Tenant) -> int:
    return max(1, round(QUANTUM_TOKENS * tenant.weight))


class Walk(RuleBasedStateMachine):
    """Every rule does the same to both."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: Queue = FairQueue()
        self.reference = Reference()

    @rule(
        tenant=sampled_from(TENANTS),
        priority=sampled_from([Priority.STANDARD, Priority.STANDARD, Priority.BATCH]),
        sizes=lists(sampled_from([1, 40, QUANTUM_TOKENS, 3 * QUANTUM_TOKENS, 4000]), min_size=1, max_size=3),
        due_s=integers(0, 2),
        num_slots=integers(1, 4),
    )
    def add(self, tenant: Tenant, priority: Priority, sizes: list[int], due_s: int, num_slots: int) -> None:
        for num_tokens in sizes:
            waiter = Waiter(num_tokens, num_slots, tenant, priority, float(due_s))
            self.queue.add(waiter)
            self.reference.add(waiter)
            assert self.queue.last(waiter) is self.reference.last(waiter)

    @precondition(lambda self: self.reference.waiting)
    @rule(data=data())
    def leave(self, data: DataObject) -> None:
        waiter = data.draw(sampled_from(self.reference.waiting))
        self.queue.remove(waiter)
        self.reference.remove(waiter)
        with pytest.raises(KeyError):
            self.queue.remove(waiter)

    @rule(stopped=sets(sampled_from(FLOWS), max_size=2), is_taken=sampled_from([True, True, True, False]))
    def serve(self, stopped: Stopped, is_taken: bool) -> None:
        head = self.queue.head(lambda waiter: (waiter.priority, waiter.tenant.name) not in stopped)
        assert head is self.reference.head(stopped)
        if head is None or not is_taken:
            return
        self.queue.remove(head, is_served=True)
        self.reference.deficits[head.tenant.name] -= head.num_tokens
        self.reference.remove(head)


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=60, stateful_step_count=50, deadline=None, derandomize=True)
