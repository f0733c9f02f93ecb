"""Schemes side by side: each field is what its own function says."""

import dataclasses

import pytest

from baton.planning.chain.partition_table import build_table
from baton.planning.chain.search import rounded
from baton.planning.chain.wavefront import chain_ttft
from baton.planning.cost_model import BATON, CostModel, Kernel, LinkModel
from baton_lab.study.comparison import Comparison, compare, enough_ranks
from baton_lab.study.peers import paper_bound, single, tsp, zigzag_ring

COST = CostModel(8, 1e-6, 1e-9, 4096, link=LinkModel(1e-5, 1e10))


def test_fields_are_what_their_functions_say() -> None:
    row = compare(6000, 4, COST, BATON, cached=100)
    assert row.single == single(6000, COST, Kernel.CAUSAL, cached=100)
    assert row.kvr_e == float(chain_ttft((1500, 1500, 1500, 1500), COST, BATON, cached=100))
    assert row.kvr_s == float(chain_ttft(row.chunks, COST, BATON, cached=100))
    assert row.tsp_dense == tsp(6000, 4, COST, Kernel.DENSE, cached=100)
    assert row.tsp_causal == tsp(6000, 4, COST, Kernel.CAUSAL, cached=100)
    assert row.zigzag_ring == zigzag_ring(6000, 4, COST, cached=100)
    assert row.paper_bound == paper_bound(6000, 4, COST)
    assert row.kvr_s <= min(row.kvr_e, row.kvr_p)
    assert row.kvr_p <= 1.02 * row.kvr_s


def test_prediction_does_not_use_the_answer() -> None:
    """At a multiple of the knots' spacing its neighbours are interpolated: 8k from 4k and 12k."""
    row = compare(8192, 3, COST, BATON)
    table = build_table(COST, BATON, {3: [4096, 12288]})
    chunks = rounded(table.fractions(8192, 3), 8192)
    assert row.kvr_p == float(chain_ttft(chunks, COST, BATON))
    assert row.kvr_s < row.kvr_p < 1.03 * row.kvr_s


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_fewer_tokens_than_ranks(num_tokens: int) -> None:
    row = compare(num_tokens, 4, COST, BATON)
    assert len(row.chunks) == min(num_tokens, 4) and sum(row.chunks) == num_tokens


def test_enough_ranks_are_the_fewest_within_the_margin() -> None:
    row: Comparison = compare(64, 2, COST, BATON)
    rows = [dataclasses.replace(row, num_ranks=n, single=10.0, kvr_s=s) for n, s in ((2, 5.1), (4, 5.0), (8, 4.99))]
    assert enough_ranks(rows, 0.03) == 2
    assert enough_ranks(rows, 0.01) == 4
    assert enough_ranks(rows, 0.0) == 8
    assert enough_ranks(rows, 2.0) == 1
