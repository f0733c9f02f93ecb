"""Fits find the numbers that made the points, and never a negative one."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidArgumentError
from baton.planning.chain.wavefront import chain_ttft
from baton.planning.cost_model import BATON, CostModel, Kernel, LinkModel, Protocol
from baton.planning.fit import RankRow, fit_link, fit_ranks
from baton_lab.study.one_rank_fit import fit_prefill
from baton_lab.study.protocols import PAPER

TOKENS = (256.0, 1024.0, 2048.0, 4096.0, 8192.0)


@given(
    linear_s=st.floats(1e-7, 1e-4),
    pair_s=st.floats(1e-11, 1e-8),
    fixed_s=st.floats(1e-5, 1e-2),
    num_layers=st.integers(1, 80),
    kernel=st.sampled_from(Kernel),
)
def test_prefill_numbers_come_back(
    linear_s: float, pair_s: float, fixed_s: float, num_layers: int, kernel: Kernel
) -> None:
    weight = 1.0 if kernel is Kernel.DENSE else 0.5
    points = [(n, num_layers * (fixed_s + linear_s * n + pair_s * weight * n * n)) for n in TOKENS]
    fitted = fit_prefill(points, num_layers, kernel)
    predicted = [num_layers * (fitted.fixed_s + fitted.linear_s * n + fitted.pair_s * weight * n * n) for n in TOKENS]
    assert predicted == pytest.approx([seconds for _, seconds in points], rel=1e-6)
    assert fitted.residual < 1e-6


def test_papers_one_gpu_row() -> None:
    """Half a percent off at most; 0.079 s a thousand tokens and 0.0207 s a thousand squared, all layers."""
    row = [(1024, 0.10), (2048, 0.24), (4096, 0.65), (8192, 1.95), (12288, 3.95)]
    fitted = fit_prefill(row, 32, Kernel.DENSE)
    assert fitted.residual < 0.01
    assert fitted.linear_s * 32 * 1024 == pytest.approx(0.079, rel=0.02)
    assert fitted.pair_s * 32 * 1024**2 == pytest.approx(0.02075, rel=0.02)


@pytest.mark.parametrize("seed", range(20))
def test_no_coefficient_is_negative_and_no_other_choice_fits_better(seed: int) -> None:
    """Noise drives plain least squares below zero; then the best non-negative numbers are found, as a grid confirms."""
    rng = np.random.default_rng(seed)
    points = [(n, float(n * 1e-3 * rng.uniform(0.7, 1.3))) for n in (1.0, 2.0, 3.0, 4.0)]
    fitted = fit_prefill(points, 1, Kernel.DENSE)

    def error(linear_s: float, pair_s: float, fixed_s: float) -> float:
        return sum(((fixed_s + linear_s * n + pair_s * n * n) / seconds - 1) ** 2 for n, seconds in points)

    found = error(fitted.linear_s, fitted.pair_s, fitted.fixed_s)
    assert min(fitted.linear_s, fitted.pair_s, fitted.fixed_s) >= 0
    grid = itertools.product(np.linspace(0, 2e-3, 25), np.linspace(0, 4e-4, 25), np.linspace(0, 2e-3, 25))
    assert found <= min(error(*each) for each in grid) + 1e-12


@given(latency_s=st.floats(1e-6, 1e-2), bandwidth=st.floats(1e6, 1e12))
def test_link_numbers_come_back(latency_s: float, bandwidth: float) -> None:
    link = LinkModel(latency_s, bandwidth)
    points = [(size, link.seconds(size)) for size in (1e3, 1e5, 1e7, 1e9)]
    fitted = fit_link(points)
    assert [fitted.seconds(size) for size, _ in points] == pytest.approx([s for _, s in points], rel=1e-6)


@pytest.mark.parametrize(
    ("points", "text"),
    [
        ([], "0 given"),
        ([(64.0, 1.0), (64.0, 1.1)], "fewer than 2 different sizes"),
        ([(64.0, 1.0), (128.0, 0.0)], "above 0"),
        ([(64.0, 1.0), (128.0, 0.5)], "larger messages took no longer"),
    ],
)
def test_points_that_say_nothing_are_refused(points: list[tuple[float, float]], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        fit_link(points)


KNOWN = CostModel(12, 1.0, 1.0, 64, project_share=0.2)
CHAINS = tuple((round(0.6 * n), n - round(0.6 * n)) for n in (64, 256, 1024, 4096))


def rows_of(cost: CostModel, protocol: Protocol, chains: tuple[tuple[int, ...], ...] = CHAINS) -> list[RankRow]:
    """Times of the ranks of those chains: all layers but the last, then the last."""
    rows = []
    for chunks in chains:
        for rank, chunk in enumerate(chunks):
            before, is_last = sum(chunks[:rank]), rank == len(chunks) - 1
            own_pairs = chunk * chunk / (2 if protocol.kernel is Kernel.CAUSAL else 1)
            layer_s = cost.fixed_s + cost.linear_s * chunk + cost.pair_s * (own_pairs + chunk * before)
            project_s = cost.fixed_s + cost.project_share * cost.linear_s * chunk
            one_query_s = (1 - cost.project_share) * cost.linear_s + cost.pair_s * (before + chunk)
            last_s = project_s + (one_query_s if is_last else 0.0) if protocol.skip_last else layer_s
            rows.append(RankRow(chunk, before, is_last, (cost.num_layers - 1) * layer_s + last_s))
    return rows


@given(
    linear_s=st.floats(1e-7, 1e-4),
    pair_s=st.floats(1e-11, 1e-8),
    fixed_s=st.floats(1e-5, 1e-2),
    num_layers=st.integers(1, 80),
    protocol=st.sampled_from([BATON, PAPER]),
)
def test_numbers_of_a_chains_ranks_come_back(
    linear_s: float, pair_s: float, fixed_s: float, num_layers: int, protocol: Protocol
) -> None:
    cost = CostModel(num_layers, linear_s, pair_s, 64, project_share=0.2, fixed_s=fixed_s)
    rows = rows_of(cost, protocol)
    fitted = fit_ranks(rows, cost, protocol)
    found = CostModel(num_layers, fitted.linear_s, fitted.pair_s, 64, project_share=0.2, fixed_s=fitted.fixed_s)
    predicted = [row.seconds for row in rows_of(found, protocol)]
    assert predicted == pytest.approx([row.seconds for row in rows], rel=1e-6)
    assert fitted.residual < 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_a_few_percent_moves_predictions_less(seed: int) -> None:
    """Compared are times to first token at lengths that were not fitted."""
    cost = CostModel(30, linear_s=30e-6, pair_s=15e-9, kv_bytes=768, project_share=0.2, fixed_s=1e-3)
    rng = np.random.default_rng(seed)
    rows = [
        RankRow(row.tokens, row.before, row.is_last, row.seconds * float(rng.normal(1, 0.03)))
        for row in rows_of(cost, BATON)
    ]
    fitted = fit_ranks(rows, cost, BATON)
    assert 0.01 < fitted.residual < 0.2
    found = CostModel(30, fitted.linear_s, fitted.pair_s, 768, project_share=0.2, fixed_s=fitted.fixed_s)
    for chunks in ((100, 50), (400, 250), (1800, 1300)):
        assert chain_ttft(chunks, found, BATON) == pytest.approx(chain_ttft(chunks, cost, BATON), rel=0.05)


def test_a_chains_rows_must_differ_and_be_times() -> None:
    with pytest.raises(InvalidArgumentError, match="rank_rows: 2 given, with fewer than 2 different chunks"):
        fit_ranks([RankRow(5, 0, True, 1.0), RankRow(5, 0, False, 1.0)], KNOWN, BATON)
    with pytest.raises(InvalidArgumentError, match="must be above 0"):
        fit_ranks([RankRow(5, 0, True, 1.0), RankRow(6, 0, True, 0.0)], KNOWN, BATON)
