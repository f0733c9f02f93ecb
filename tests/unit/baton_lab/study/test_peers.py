"""Schemes that chains are compared with, against counted work and the published simulation of the peers."""

import math

import pytest

from baton.planning.chain.search import search
from baton.planning.chain.wavefront import chain_ttft
from baton.planning.cost_model import BATON, CostModel, Kernel, LinkModel, Protocol, Receive
from baton.planning.hardware import Hardware, derive
from baton_lab.study.known_models import SHAPES
from baton_lab.study.peers import bound, paper_bound, single, tsp, zigzag_ring
from baton_lab.study.protocols import PAPER_OVERLAPPED

PAIRS_ONLY = CostModel(1, 0.0, 1.0, 0)
ROWS = [
    (8, 4, 50, (0.111, 0.108, 0.092, 0.087, 0.084, 0.081)),
    (32, 8, 10, (0.698, 0.687, 0.534, 0.402, 0.398, 0.374)),
    (32, 4, 1, (3.86, 3.82, 3.55, 1.65, 1.44, 1.39)),
]
"""k tokens, ranks, GB/s; TSP dense and causal, zigzag ring, KVR-S dense, causal, cut through: seconds
of Llama-3.1-8B at 400 TFLOP/s a rank and 15 us, from an earlier, separate simulation."""


@pytest.mark.parametrize(("thousands", "ranks", "gb_s", "expected"), ROWS)
def test_an_earlier_simulation_is_reproduced(
    thousands: int, ranks: int, gb_s: float, expected: tuple[float, ...]
) -> None:
    tokens = thousands * 1024
    cost = derive(SHAPES["llama-3.1-8b"], Hardware(4e14, 4e14, LinkModel(15e-6, gb_s * 1e9)))
    naive = Protocol(Kernel.CAUSAL, Receive.OVERLAPPED, skip_last=False)
    chains = [
        float(chain_ttft(search(tokens, ranks, cost, each), cost, each)) for each in (PAPER_OVERLAPPED, naive, BATON)
    ]
    peers = [
        tsp(tokens, ranks, cost, Kernel.DENSE),
        tsp(tokens, ranks, cost, Kernel.CAUSAL),
        zigzag_ring(tokens, ranks, cost),
    ]
    assert [*peers, *chains] == pytest.approx(list(expected), rel=0.01)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_zigzag_balances_the_triangle(ranks: int) -> None:
    """2n chunks, rank i holds chunks i and 2n - 1 - i: counted, each has the area that the formula says."""
    size, num_chunks = 6, 2 * ranks
    tokens = size * num_chunks
    for rank in range(ranks):
        rows = [size * chunk + row for chunk in (rank, num_chunks - 1 - rank) for row in range(size)]
        area = sum(row + 0.5 for row in rows)
        assert area == pytest.approx(zigzag_ring(tokens, ranks, PAIRS_ONLY))


@pytest.mark.parametrize("ranks", [2, 5])
def test_contiguous_causal_is_as_slow_as_its_last_rank(ranks: int) -> None:
    tokens = 60 * ranks
    last = sum(row + 0.5 for row in range(tokens - 60, tokens))
    assert tsp(tokens, ranks, PAIRS_ONLY, Kernel.CAUSAL) == pytest.approx(last)


def test_ring_hides_messages_under_attention_and_shows_the_rest() -> None:
    cost = CostModel(1, 0.0, 1.0, 1, link=LinkModel(0.0, 1.0))
    assert zigzag_ring(100, 2, cost) == 2 * 1250  # a step of 50 * 50 / 2 pairs, a message of 50
    slow = CostModel(1, 0.0, 1.0, 100, link=LinkModel(0.0, 1.0))
    assert zigzag_ring(100, 2, slow) == 2 * 1250 + (5000 - 1250)


def test_all_gather_pays_latency_in_every_layer_and_step() -> None:
    late = CostModel(7, 1.0, 0.0, 0, link=LinkModel(0.5))
    assert tsp(100, 4, late, Kernel.DENSE) == 7 * (25 + 3 * 0.5)
    assert tsp(100, 1, late, Kernel.DENSE) == single(100, late, Kernel.DENSE) == 700


def test_issue_time_is_a_floor_and_fixed_time_adds() -> None:
    assert single(10, CostModel(2, 1.0, 0.0, 0, issue_s=30.0), Kernel.DENSE) == 60
    assert single(10, CostModel(2, 1.0, 0.0, 0, issue_s=5.0), Kernel.DENSE) == 20
    assert single(10, CostModel(2, 1.0, 0.0, 0, fixed_s=5.0, head_s=1.0), Kernel.DENSE) == 31


@pytest.mark.parametrize(("ranks", "speedup"), [(2, 8 / 3), (4, 6.4), (8, 128 / 9)])
def test_papers_bound_is_superlinear(ranks: int, speedup: float) -> None:
    base = single(4096, PAIRS_ONLY, Kernel.DENSE)
    assert base / paper_bound(4096, ranks, PAIRS_ONLY) == pytest.approx(speedup)


def test_a_chain_beats_the_bound_by_the_last_layer_at_most() -> None:
    """Nobody waits for what earlier ranks would compute after the last layer's KV has left."""
    cost = CostModel(8, 1e-6, 1e-9, 4096, link=LinkModel(0.0, math.inf))
    protocol = Protocol(Kernel.CAUSAL, Receive.LOCAL_FIRST, skip_last=False)
    for tokens in (64, 1000, 30_000):
        for ranks in (2, 4):
            least = bound(tokens, ranks, cost)
            assert float(chain_ttft(search(tokens, ranks, cost, protocol), cost, protocol)) >= least * 7 / 8
            assert zigzag_ring(tokens, ranks, cost) >= least * (1 - 1e-12)


def test_a_cached_prefix_costs_attention_only() -> None:
    cost = CostModel(2, 3.0, 1.0, 0)
    assert single(4, cost, Kernel.CAUSAL, cached=10) - single(4, cost, Kernel.CAUSAL) == 2 * 4 * 10
    assert tsp(4, 2, cost, Kernel.DENSE, cached=10) - tsp(4, 2, cost, Kernel.DENSE) == 2 * 2 * 10
