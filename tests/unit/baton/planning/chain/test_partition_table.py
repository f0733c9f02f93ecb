"""KVR-P: exact at knots, linear between, clamped outside."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError, InvalidArgumentError
from baton.planning.chain.partition_table import Knot, PartitionTable, build_table
from baton.planning.chain.search import search
from baton.planning.chain.wavefront import chain_ttft
from baton.planning.cost_model import CostModel, LinkModel
from baton.types import TokenRange
from baton_lab.study.protocols import PAPER, PAPER_OVERLAPPED

COST = CostModel(32, 0.0790 / 1024 / 32, 0.02075 / 1024**2 / 32, 16384)
"""The paper's Llama-7B without links (test_search)."""
TABLE = PartitionTable({2: (Knot(100, (0.6, 0.4)), Knot(200, (0.5, 0.5)), Knot(400, (0.7, 0.3)))})


def lengths(table: PartitionTable, num_tokens: int, num_ranks: int, start: int = 0) -> list[int]:
    chunks = table.partition(TokenRange(start, start + num_tokens), num_ranks)
    assert chunks[0].start == start
    return [len(chunk) for chunk in chunks]


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(100, [60, 40]), (200, [100, 100]), (400, [280, 120]), (50, [30, 20]), (1000, [700, 300]), (150, [82, 68])],
)
def test_knots_are_exact_and_the_nearest_holds_outside(num_tokens: int, expected: list[int]) -> None:
    assert lengths(TABLE, num_tokens, 2, start=7) == expected


def test_between_knots_fractions_are_linear() -> None:
    assert TABLE.fractions(300, 2) == pytest.approx((0.6, 0.4))
    assert TABLE.fractions(225, 2) == pytest.approx((0.525, 0.475))


def test_paper_10k_on_four_ranks_from_8k_and_12k() -> None:
    table = build_table(COST, PAPER_OVERLAPPED, {4: [8192, 12288]})
    assert table.fractions(10240, 4) == pytest.approx((0.350, 0.255, 0.210, 0.185), abs=0.005)


@pytest.mark.parametrize("num_tokens", [6144, 10240, 14336])
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_prediction_is_within_the_papers_margin_of_the_search(num_tokens: int, num_ranks: int) -> None:
    """1.3 %, with knots 4k apart."""
    cost = CostModel(32, COST.linear_s, COST.pair_s, 16384, link=LinkModel(1e-4, 3e11))
    around = [num_tokens // 4096 * 4096, num_tokens // 4096 * 4096 + 4096]
    table = build_table(cost, PAPER, {num_ranks: around})
    predicted = float(chain_ttft(lengths(table, num_tokens, num_ranks), cost, PAPER))
    searched = float(chain_ttft(search(num_tokens, num_ranks, cost, PAPER), cost, PAPER))
    assert searched <= predicted <= 1.013 * searched


@given(num_tokens=st.integers(1, 3000), num_ranks=st.sampled_from([1, 2]), start=st.integers(0, 99))
def test_every_rank_gets_a_token_and_the_sum_is_exact(num_tokens: int, num_ranks: int, start: int) -> None:
    skewed = PartitionTable({2: (Knot(100, (1e-6, 1 - 1e-6)),)})
    chunks = lengths(skewed, num_tokens, num_ranks, start)
    assert sum(chunks) == num_tokens and min(chunks) >= 1
    assert len(chunks) == min(num_tokens, num_ranks)


def test_ranks_without_knots_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no knots for 3 ranks .it has 2."):
        lengths(TABLE, 100, 3)
    with pytest.raises(InvalidArgumentError, match="num_ranks"):
        lengths(TABLE, 100, 0)


@pytest.mark.parametrize(
    ("fractions", "text"),
    [((0.5, 0.4), "do not sum to 1"), ((0.5, 0.3, 0.2), "not one fraction for each"), ((0.0, 1.0), "computes nothing")],
)
def test_a_knot_divides_the_whole_prompt_among_all_ranks(fractions: tuple[float, ...], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        PartitionTable({2: (Knot(100, fractions),)})


def test_knots_are_there_and_ascend() -> None:
    with pytest.raises(AssertionError, match="no knots for 2 ranks"):
        PartitionTable({2: ()})
    with pytest.raises(AssertionError, match="do not ascend"):
        PartitionTable({2: (Knot(200, (0.5, 0.5)), Knot(100, (0.5, 0.5)))})
