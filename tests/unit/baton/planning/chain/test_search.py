"""The search finds what brute force finds, the worked examples of the paper, and shapes far from even ones."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from baton.planning.chain.search import Partitions, analytic_seed, rounded, search
from baton.planning.chain.wavefront import chain_ttft
from baton.planning.cost_model import BATON, CostModel, Kernel, LinkModel, Protocol
from baton.planning.hardware import Hardware, derive
from baton_lab.study.known_models import SHAPES
from baton_lab.study.protocols import PAPER, PAPER_OVERLAPPED, PROTOCOLS, STORE_AND_FORWARD

PER_TOKEN, PER_PAIR = 0.0790 / 1024, 0.02075 / 1024**2
"""Llama-7B on one A100, the whole model, from the paper's one-GPU row."""
PAPER_COST = CostModel(32, PER_TOKEN / 32, PER_PAIR / 32, 16384)
"""Without links: as the paper's TTFT(p)."""
SLOW = derive(SHAPES["llama-3.1-8b"], Hardware(4e14, 4e14, LinkModel(15e-6, 1e9)))


def ttft(chunks: tuple[int, ...], cost: CostModel, protocol: Protocol) -> float:
    return float(chain_ttft(chunks, cost, protocol))


def compositions(num_tokens: int, num_ranks: int) -> NDArray[np.float64]:
    """Every way to divide the tokens."""
    cuts = itertools.combinations(range(1, num_tokens), num_ranks - 1)
    return np.array([np.diff([0, *cut, num_tokens]) for cut in cuts], dtype=np.float64)


@settings(max_examples=60, deadline=None)
@given(
    num_tokens=st.integers(4, 26),
    num_ranks=st.integers(2, 4),
    pair_s=st.sampled_from([0.0, 0.01, 0.1, 1.0]),
    link=st.builds(LinkModel, st.sampled_from([0.0, 1.0]), st.sampled_from([0.3, 1.0, 5.0, 1e6])),
    protocol=st.sampled_from(sorted(PROTOCOLS)),
)
def test_search_is_as_good_as_trying_everything(
    num_tokens: int, num_ranks: int, pair_s: float, link: LinkModel, protocol: str
) -> None:
    cost = CostModel(5, 1.0, pair_s, 1, fixed_s=0.5, link=link)
    best_s = chain_ttft(compositions(num_tokens, num_ranks), cost, PROTOCOLS[protocol]).min()
    found = search(num_tokens, num_ranks, cost, PROTOCOLS[protocol])
    assert ttft(found, cost, PROTOCOLS[protocol]) == pytest.approx(best_s, rel=1e-9)


@given(
    num_tokens=st.integers(1, 5000),
    num_ranks=st.integers(1, 9),
    cached=st.integers(0, 3000),
    bandwidth=st.sampled_from([1e6, 1e9, 1e12]),
)
@settings(max_examples=40, deadline=None)
def test_chunks_cover_the_prompt(num_tokens: int, num_ranks: int, cached: int, bandwidth: float) -> None:
    cost = CostModel(4, 1e-6, 1e-9, 4096, link=LinkModel(1e-5, bandwidth))
    width = min(num_ranks, num_tokens)
    chunks = search(num_tokens, width, cost, BATON, cached=cached)
    assert (len(chunks), sum(chunks)) == (width, num_tokens)
    assert min(chunks) >= 1


def test_paper_16k_on_two_ranks() -> None:
    chunks = search(16384, 2, PAPER_COST, PAPER_OVERLAPPED)
    assert chunks[0] / 16384 == pytest.approx(9728 / 16384, abs=0.005)


@pytest.mark.parametrize("how", ["seed", "search"])
def test_paper_10k_on_four_ranks(how: str) -> None:
    if how == "seed":
        chunks = analytic_seed(10240, 4, PAPER_COST, Kernel.DENSE)
    else:
        chunks = search(10240, 4, PAPER_COST, PAPER_OVERLAPPED)
    assert np.array(chunks) / 10240 == pytest.approx(np.array([0.350, 0.255, 0.210, 0.185]), abs=0.005)


def grid_search(
    num_tokens: int,
    num_ranks: int,
    evaluate: Callable[[Partitions], NDArray[np.float64]],
    step: int,
    min_step: int,
) -> tuple[int, ...]:
    """The paper's hierarchical grid: five values for each boundary, around the even ones first, then around the best
    grid point with half the step, down to `min_step`. Evaluates 5^(n - 1) partitions a step."""
    centre = np.array([num_tokens * rank // num_ranks for rank in range(1, num_ranks)])
    while True:
        axes = [boundary + step * np.arange(-2, 3) for boundary in centre]
        boundaries = np.array(list(itertools.product(*axes)), dtype=np.float64)
        partitions = np.diff(boundaries, axis=1, prepend=0.0, append=float(num_tokens))
        allowed = (partitions >= 1).all(axis=1)
        centre = boundaries[allowed][evaluate(partitions[allowed]).argmin()].astype(int)
        if step <= min_step:
            return tuple(int(chunk) for chunk in np.diff([0, *centre, num_tokens]))
        step = max(step // 2, min_step)


def test_paper_grid_of_96_tokens() -> None:
    """[0, 28, 70, 96] from steps of 8, 4, 2, 1 around [0, 32, 64, 96]: where the least time lies there, it is found."""

    def evaluate(partitions: NDArray[np.float64]) -> NDArray[np.float64]:
        first, second = partitions[:, 0], partitions[:, 0] + partitions[:, 1]
        return np.abs(first - 28) + 2.0 * np.abs(second - 70)

    assert grid_search(96, 3, evaluate, step=8, min_step=1) == (28, 42, 26)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("num_tokens", [4096, 16384])
def test_search_is_no_worse_than_the_papers_grid(num_tokens: int, num_ranks: int) -> None:
    cost = CostModel(32, PER_TOKEN / 32, PER_PAIR / 32, 16384, link=LinkModel(1e-4, 3e11))

    def evaluate(partitions: NDArray[np.float64]) -> NDArray[np.float64]:
        return chain_ttft(partitions, cost, PAPER)

    step = num_tokens // num_ranks // 4
    grid = grid_search(num_tokens, num_ranks, evaluate, step=step, min_step=max(step // 16, 1))
    assert ttft(search(num_tokens, num_ranks, cost, PAPER), cost, PAPER) <= ttft(grid, cost, PAPER)


def test_seed_gives_every_rank_the_same_work() -> None:
    for kernel, weight in ((Kernel.DENSE, 1.0), (Kernel.CAUSAL, 0.5)):
        chunks = analytic_seed(100_000, 5, PAPER_COST, kernel, cached=20_000)
        starts = itertools.accumulate(chunks[:-1], initial=20_000)
        work = [
            c * (PAPER_COST.linear_s + PAPER_COST.pair_s * (s + weight * c))
            for c, s in zip(chunks, starts, strict=True)
        ]
        assert max(work) / min(work) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("protocol", [STORE_AND_FORWARD, BATON])
def test_slow_links_give_the_last_rank_the_most(protocol: Protocol) -> None:
    """8k tokens, 4 ranks, 1 GB/s: three quarters on the last rank; how the rest is spread hardly matters."""
    chunks = search(8192, 4, SLOW, protocol)
    assert chunks[-1] / 8192 == pytest.approx(0.76, abs=0.01)
    assert list(chunks) == sorted(chunks)
    known = rounded([0.03, 0.05, 0.16, 0.76], 8192)
    assert ttft(chunks, SLOW, protocol) <= ttft(known, SLOW, protocol)
    assert ttft(known, SLOW, protocol) <= 1.02 * ttft(chunks, SLOW, protocol)
    assert ttft(known, SLOW, protocol) < ttft(rounded([1] * 4, 8192), SLOW, protocol) / 3


def test_hopeless_links_leave_nearly_all_to_the_last_rank() -> None:
    cost = CostModel(8, 1e-6, 0.0, 4096, link=LinkModel(0.0, 1e5))
    assert search(1000, 4, cost, BATON) == (1, 1, 1, 997)


def test_a_prefix_flattens_the_partition() -> None:
    """Behind a long cached prefix every token attends to about as much: chunks come out nearly even."""
    spread = [max(c) / min(c) for c in (search(8192, 4, PAPER_COST, BATON, cached=p) for p in (0, 8192, 131072))]
    assert spread == sorted(spread, reverse=True)
    assert spread[-1] < 1.1


def test_slack_buys_balance_and_costs_no_more_than_that() -> None:
    """Where issuing kernels takes longer than computing, ranks hardly matter; the seed is nearest to balance."""
    cost = CostModel(32, PER_TOKEN / 32, PER_PAIR / 32, 16384, issue_s=3e-3, link=LinkModel(1e-4, 3e11))
    exact, balanced = (search(4096, 8, cost, PAPER, slack=slack) for slack in (0.0, 0.005))
    assert ttft(exact, cost, PAPER) <= ttft(balanced, cost, PAPER) <= 1.005 * ttft(exact, cost, PAPER) * (1 + 1e-6)
    seed = np.array(analytic_seed(4096, 8, cost, PAPER.kernel))
    assert np.abs(np.array(balanced) - seed).sum() < np.abs(np.array(exact) - seed).sum() / 2


def test_resolution_puts_boundaries_at_multiples() -> None:
    chunks = search(10_000, 4, PAPER_COST, PAPER, resolution=64)
    assert sum(chunks) == 10_000
    assert all(end % 64 == 0 for end in itertools.accumulate(chunks[:-1]))
    assert search(7, 4, PAPER_COST, PAPER, resolution=64) == search(7, 4, PAPER_COST, PAPER)


@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9), spare=st.integers(0, 2000))
def test_rounding_keeps_the_sum_and_a_token_each(weights: list[float], spare: int) -> None:
    num_tokens = len(weights) + spare
    chunks = rounded(weights, num_tokens)
    assert sum(chunks) == num_tokens and min(chunks) >= 1
    assert len(chunks) == len(weights)
