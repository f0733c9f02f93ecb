"""The recursion, held against a simulation that knows nothing of recursions: events, ranks, links, queues."""

import heapq
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.planning.chain.wavefront import chain_ttft, work_of
from baton.planning.cost_model import BATON, CostModel, Kernel, LinkModel, Protocol, Receive
from baton_lab.study.peers import tsp
from baton_lab.study.protocols import PAPER, PAPER_OVERLAPPED, PROTOCOLS, STORE_AND_FORWARD
from tests.support.folders import DATA
from tests.support.wavefront import reference

COST = CostModel(
    num_layers=3, linear_s=1.0, pair_s=0.5, kv_bytes=10, project_share=0.25, head_s=0.75, link=LinkModel(0.5, 40.0)
)
GOLDEN: dict[str, Any] = json.loads((DATA / "kv_runahead_tables.json").read_text())["golden"]
"""The paper's worked example, counted by hand."""
PAIRS = CostModel(num_layers=1, linear_s=0.0, pair_s=1.0, kv_bytes=0)
"""A second for each (query, key) pair."""
ENTRIES = CostModel(num_layers=1, linear_s=0.0, pair_s=1e-12, kv_bytes=2, link=LinkModel(0.0, 1.0))
"""A second for each K or V entry that a link carries, and next to none for all else."""

links = st.builds(LinkModel, st.floats(0, 3), st.floats(0.5, 1000) | st.just(math.inf))
costs = st.builds(
    CostModel,
    num_layers=st.integers(1, 6),
    linear_s=st.floats(0.01, 2),
    pair_s=st.floats(0, 1),
    kv_bytes=st.integers(1, 20),
    project_share=st.floats(0, 1),
    fixed_s=st.just(0.0) | st.floats(0, 5),
    issue_s=st.just(0.0) | st.floats(0, 50),
    head_s=st.floats(0, 1),
    copy_s=st.floats(0, 1),
    link=links,
    push=st.none() | links,
)
protocols = st.builds(
    Protocol,
    kernel=st.sampled_from(Kernel),
    receive=st.sampled_from(Receive),
    skip_last=st.booleans(),
    num_copies=st.integers(0, 2),
) | st.sampled_from(list(PROTOCOLS.values()))
chunk_lists = st.lists(st.integers(1, 30), min_size=1, max_size=6)


class Server:
    """Sends jobs one after the other in the order given by `expected`, each as soon as it is there."""

    def __init__(self, sim: "Simulation", expected: list[tuple[int, int]]) -> None:
        self._sim, self._expected, self._busy = sim, expected, False
        self._there: dict[tuple[int, int], tuple[float, Callable[[], None]]] = {}

    def offer(self, key: tuple[int, int], seconds: float, done: Callable[[], None]) -> None:
        self._there[key] = (seconds, done)
        self._next()

    def _next(self) -> None:
        if not self._busy and self._expected and self._expected[0] in self._there:
            seconds, done = self._there.pop(self._expected.pop(0))
            self._busy = True
            self._sim.after(seconds, lambda: self._finish(done))

    def _finish(self, done: Callable[[], None]) -> None:
        self._busy = False
        done()
        self._next()


class Simulation:
    """One prompt through a chain, as a queue of events."""

    def __init__(self, chunks: list[int], cost: CostModel, protocol: Protocol, cached: int) -> None:
        self.chunks, self.cost, self.protocol, self.cached = chunks, cost, protocol, cached
        self.now, self.first_token, self.last_push = 0.0, math.nan, 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        last, layers = len(chunks) - 1, range(cost.num_layers)
        self.begun: dict[tuple[int, int], float] = {}
        self.got: dict[tuple[int, int], int] = {}
        self.projected: set[tuple[int, int]] = set()
        self.own_done: set[tuple[int, int]] = set()
        self.passed: set[tuple[int, int]] = set()
        self.completed: set[tuple[int, int]] = set()
        messages = [range(rank + 1) if protocol.cut_through else range(1) for rank in range(last)]
        self.links = [Server(self, [(layer, m) for layer in layers for m in each]) for each in messages]
        self.pushes = [Server(self, [(layer, 0) for layer in layers]) for _ in chunks]
        self.waiting: dict[int, tuple[int, int]] = {}
        self.ready: set[tuple[int, int]] = set()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, action))

    def run(self) -> float:
        for rank in range(len(self.chunks)):
            self.begin(rank, 0)
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()
        if self.cost.push is None:
            return self.first_token
        return max(self.first_token, self.last_push) + self.cost.push.latency_s

    def parts(self, rank: int, layer: int) -> tuple[float, float, float, float]:
        """Seconds of projecting, own attention, the rest, and copying, counted pair by pair."""
        cost, chunk, before = self.cost, self.chunks[rank], self.cached + sum(self.chunks[:rank])
        cut_short = self.protocol.skip_last and layer == cost.num_layers - 1 and rank == len(self.chunks) - 1
        queries = 1 if cut_short else chunk
        own_pairs = queries * chunk / (1 if cut_short or self.protocol.kernel is Kernel.DENSE else 2)
        project_s = cost.fixed_s + cost.project_share * cost.linear_s * chunk
        rest_s = (1 - cost.project_share) * cost.linear_s * queries
        copied = sum(self.chunks[: rank + 1]) if rank else 0
        far_s = cost.pair_s * queries * before + rest_s
        return project_s, cost.pair_s * own_pairs, far_s, self.protocol.num_copies * cost.copy_s * copied

    def begin(self, rank: int, layer: int) -> None:
        if layer == self.cost.num_layers:
            if rank == len(self.chunks) - 1:
                self.first_token = self.now + self.cost.head_s
            return
        if self.protocol.receive is Receive.BLOCKING and rank:
            self.waiting[rank] = (rank, layer)
            self.match(rank, layer)
        else:
            self.start(rank, layer)

    def match(self, rank: int, layer: int) -> None:
        """BLOCKING: the message sets out when its sender has it and its receiver waits for it."""
        if self.waiting.get(rank) == (rank, layer) and (rank - 1, layer) in self.ready:
            del self.waiting[rank]
            self.got[rank, layer] = 1
            size = sum(self.chunks[:rank]) * self.cost.kv_bytes
            self.after(self.cost.link.seconds(size), lambda: self.start(rank, layer))

    def start(self, rank: int, layer: int) -> None:
        self.begun[rank, layer] = self.now
        self.after(self.parts(rank, layer)[0], lambda: self.has_projected(rank, layer))

    def has_projected(self, rank: int, layer: int) -> None:
        cost, at = self.cost, (rank, layer)
        self.projected.add(at)
        if cost.push is not None:
            rows = self.chunks[rank] + (self.cached if rank == 0 else 0)
            self.pushes[rank].offer((layer, 0), rows * cost.kv_bytes / cost.push.bandwidth, self.pushed)
        if self.protocol.cut_through:
            self.send(rank, layer, rank)
        if self.protocol.receive is Receive.LOCAL_FIRST or rank == 0:
            self.after(self.parts(rank, layer)[1], lambda: self.has_attended(rank, layer))
        self.go_on(rank, layer)

    def pushed(self) -> None:
        self.last_push = self.now

    def has_attended(self, rank: int, layer: int) -> None:
        self.own_done.add((rank, layer))
        self.go_on(rank, layer)

    def arrives(self, rank: int, layer: int, message: int) -> None:
        self.got[rank, layer] = self.got.get((rank, layer), 0) + 1
        if self.protocol.cut_through and rank < len(self.chunks) - 1:
            self.send(rank, layer, message)
        self.go_on(rank, layer)

    def has_all(self, rank: int, layer: int) -> bool:
        expected = rank if self.protocol.cut_through else min(rank, 1)
        return self.got.get((rank, layer), 0) == expected

    def go_on(self, rank: int, layer: int) -> None:
        """Once projected and received, passes on; once attended to itself too, completes the layer."""
        at, (_, own_s, far_s, copy_s) = (rank, layer), self.parts(rank, layer)
        if at not in self.projected or not self.has_all(rank, layer) or at in self.completed:
            return
        if at not in self.passed:
            self.passed.add(at)
            self.after(copy_s, lambda: self.pass_on(rank, layer))
        if self.protocol.receive is Receive.LOCAL_FIRST or rank == 0:
            if at not in self.own_done:
                return
            own_s = 0.0
        self.completed.add(at)
        end_s = max(self.now + own_s + far_s + copy_s, self.begun[at] + self.cost.issue_s)
        self.after(end_s - self.now, lambda: self.begin(rank, layer + 1))

    def pass_on(self, rank: int, layer: int) -> None:
        self.ready.add((rank, layer))
        if self.protocol.receive is Receive.BLOCKING:
            self.match(rank + 1, layer)
        elif not self.protocol.cut_through:
            self.send(rank, layer, 0)

    def send(self, rank: int, layer: int, message: int) -> None:
        if rank == len(self.chunks) - 1:
            return
        tokens = self.chunks[message] if self.protocol.cut_through else sum(self.chunks[: rank + 1])
        seconds, latency_s = tokens * self.cost.kv_bytes / self.cost.link.bandwidth, self.cost.link.latency_s
        self.links[rank].offer(
            (layer, message), seconds, lambda: self.after(latency_s, lambda: self.arrives(rank + 1, layer, message))
        )


def simulated(chunks: list[int], cost: CostModel, protocol: Protocol, cached: int = 0) -> float:
    return Simulation(chunks, cost, protocol, cached).run()


@given(chunks=chunk_lists, cost=costs, protocol=protocols, cached=st.integers(0, 40))
def test_recursion_is_what_events_come_to(chunks: list[int], cost: CostModel, protocol: Protocol, cached: int) -> None:
    expected = simulated(chunks, cost, protocol, cached)
    assert reference(chunks, cost, protocol, cached=cached) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(chunks=chunk_lists, cost=costs, protocol=protocols, cached=st.integers(0, 40))
def test_all_layers_at_once_are_the_recursion(
    chunks: list[int], cost: CostModel, protocol: Protocol, cached: int
) -> None:
    expected = reference(chunks, cost, protocol, cached=cached)
    assert float(chain_ttft(chunks, cost, protocol, cached=cached)) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(partitions=st.lists(st.lists(st.integers(1, 30), min_size=3, max_size=3), min_size=1, max_size=5), cost=costs)
def test_many_partitions_at_once_are_each_alone(partitions: list[list[int]], cost: CostModel) -> None:
    together = chain_ttft(np.array(partitions, dtype=float), cost, BATON)
    alone = [float(chain_ttft(chunks, cost, BATON)) for chunks in partitions]
    assert together.tolist() == pytest.approx(alone, rel=1e-12)


def pairs(chunks: Sequence[int], protocol: Protocol) -> list[float]:
    """(query, key) pairs that each rank of a chain computes in a layer."""
    work = work_of(np.array([chunks], dtype=np.float64), PAIRS, protocol, cached=0)
    return list(work.layer[0])


def test_nine_tokens_on_three_ranks_as_in_the_paper() -> None:
    chunks, tokens = GOLDEN["chunks"], GOLDEN["tokens"]
    assert (chunks, tokens) == ([4, 3, 2], 9)
    assert pairs(chunks, PAPER) == GOLDEN["dot_products"] == [16, 21, 18]
    assert tsp(tokens, 3, PAIRS, Kernel.DENSE) == GOLDEN["tsp_dot_products_per_rank"] == 27
    assert float(chain_ttft(chunks, ENTRIES, PAPER)) == pytest.approx(GOLDEN["kv_entries_sent"])
    assert 3 * tsp(tokens, 3, ENTRIES, Kernel.DENSE) == pytest.approx(GOLDEN["tsp_kv_entries_sent"])


@pytest.mark.parametrize("chunks", [(9,), (4, 3, 2), (1, 1, 7), (3, 3, 3)])
def test_causal_pairs_are_half_of_the_square_for_any_partition(chunks: tuple[int, ...]) -> None:
    assert sum(pairs(chunks, BATON)) == 9 * 9 / 2


def test_even_chain_sends_half_of_an_all_gather() -> None:
    in_chain = float(chain_ttft((4, 4, 4, 4), ENTRIES, PAPER))
    assert 2 * in_chain == pytest.approx(4 * tsp(16, 4, ENTRIES, Kernel.DENSE))


def test_two_ranks_by_hand() -> None:
    """One token each, dense kernels.

    Rank 0: 0.25 projecting, 0.5 own attention, 0.75 the rest, 1.5 a layer. Its KV leaves at 0.25, 1.75, 3.25 and is on
    its way for 0.5 + 10 / 40: there at 1, 2.5, 4. Rank 1 then needs 0.5 + 0.5 + 0.75 = 1.75: layer 0 ends at 2.75. It
    projects the next two within 0.25, later than their KV comes: 4.75 and 6.75. The head: 7.5.
    """
    assert float(chain_ttft((1, 1), COST, PAPER_OVERLAPPED)) == 7.5
    assert reference((1, 1), COST, PAPER_OVERLAPPED) == 7.5


def test_own_chunk_first_hides_the_wait() -> None:
    """In rank 1's first layer, 0.25 of own attention fall into the wait."""
    protocol = Protocol(Kernel.CAUSAL, Receive.LOCAL_FIRST, skip_last=False)
    overlapped = Protocol(Kernel.CAUSAL, Receive.OVERLAPPED, skip_last=False)
    assert reference((1, 1), COST, overlapped) - reference((1, 1), COST, protocol) == 0.25


def test_latency_is_paid_once_a_hop_and_not_once_a_layer() -> None:
    chunks = (100, 100, 100, 100)
    for num_layers in (4, 40):
        cost = CostModel(num_layers, 1.0, 0.0, 1, link=LinkModel(0.0))
        late = CostModel(num_layers, 1.0, 0.0, 1, link=LinkModel(7.0))
        assert reference(chunks, late, PAPER_OVERLAPPED) - reference(chunks, cost, PAPER_OVERLAPPED) <= 3 * 7.0
        blocking = reference(chunks, late, PAPER) - reference(chunks, cost, PAPER)
        assert blocking >= num_layers * 7.0


def test_every_step_from_the_paper_to_ours_helps() -> None:
    """Causal kernel, own chunk first, last layer cut short, chunks passed on as they come."""
    cost = CostModel(32, 1e-6, 4e-11, 4096, link=LinkModel(15e-6, 1e10))
    steps = [
        PAPER_OVERLAPPED,
        Protocol(Kernel.CAUSAL, Receive.OVERLAPPED, skip_last=False),
        Protocol(Kernel.CAUSAL, Receive.LOCAL_FIRST, skip_last=False),
        STORE_AND_FORWARD,
        BATON,
    ]
    times = [float(chain_ttft((4096, 4096, 4096, 4096), cost, protocol)) for protocol in steps]
    assert times == sorted(times, reverse=True) and len(set(times)) == len(times)


def test_pushing_kv_exposes_the_tail_only() -> None:
    """If links are no slower than a layer, only the rest of the last layer is waited for."""
    cost = CostModel(10, 1e-3, 0.0, 100, link=LinkModel(0.0))
    pushing = CostModel(10, 1e-3, 0.0, 100, link=LinkModel(0.0), push=LinkModel(0.25, 2e5))
    chunks = (50, 50)
    without, with_push = reference(chunks, cost, BATON), reference(chunks, pushing, BATON)
    last_layer_s = 50 * 100 / 2e5
    assert 0.25 <= with_push - without <= 0.25 + last_layer_s


def test_one_prediction_takes_at_most_two_milliseconds_of_processor_time() -> None:
    cost = CostModel(32, 1e-6, 4e-11, 4096, link=LinkModel(15e-6, 1e10))

    def used_s() -> float:
        began_s = time.thread_time()
        chain_ttft((2400, 2100, 1900, 1792), cost, BATON)
        return time.thread_time() - began_s

    assert min(used_s() for _ in range(50)) < 2e-3
