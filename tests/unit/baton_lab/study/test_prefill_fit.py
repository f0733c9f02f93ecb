"""Fits of prefill and of links find the costs with which measurements were simulated."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidArgumentError
from baton.planning.chain.wavefront import chain_ttft
from baton.planning.cost_model import BATON, CostModel, Kernel, LinkModel, Protocol
from baton_lab.study.prefill_fit import RankRow, fit_chain, fit_link, fit_prefill, fit_ranks, measured_link
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
    """Return times of the ranks of these chains: all layers except the last, then the last."""
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
    """Times to first token are compared at lengths that were not fitted."""
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


ORIGIN = CostModel(
    30, 2e-6, 3e-9, 768, project_share=0.2, fixed_s=1e-3, issue_s=2e-3, copy_s=1e-9, link=LinkModel(1e-4, 1e9)
)
MESSAGES = tuple((float(size), 3e-4 + size / 2e9) for size in (1e4, 1e6, 1e8))


def chain_rows() -> list[RankRow]:
    """Return times of ranks whose layers take 1 us per token, and nothing else."""
    return [RankRow(n, before, True, 30 * 1e-6 * n) for n, before in ((100, 0), (200, 100), (400, 0))]


def test_a_chains_rows_become_costs_and_what_was_not_measured_stays() -> None:
    made = fit_chain(ORIGIN, chain_rows(), MESSAGES, request_s=0.02)
    assert made.linear_s == pytest.approx(1e-6, rel=0.2)
    assert (made.issue_s, made.head_s) == (0.0, 0.02)
    assert (made.link.latency_s, made.link.bandwidth) == pytest.approx((3e-4, 2e9), rel=1e-3)
    for name in ("num_layers", "kv_bytes", "project_share", "copy_s", "push"):
        assert getattr(made, name) == getattr(ORIGIN, name), name
    for row in chain_rows():
        predicted_s = 30 * (made.fixed_s + made.linear_s * row.tokens)
        assert predicted_s == pytest.approx(row.seconds, rel=0.1)


@pytest.mark.parametrize("latency_s", [3e-4, 0.0])
def test_costs_of_a_chain_come_back_with_its_link(latency_s: float) -> None:
    link = LinkModel(latency_s, 2e9)
    points = tuple((float(size), link.seconds(size)) for size in (1e4, 1e6, 1e8))
    made = fit_chain(ORIGIN, rows_of(ORIGIN, BATON), points, request_s=ORIGIN.head_s)
    for chunks in ((100, 50), (1800, 1300)):
        assert work_s(made, chunks) == pytest.approx(work_s(ORIGIN, chunks), rel=1e-6)
    assert made.link.seconds(1e6) == pytest.approx(link.seconds(1e6), rel=1e-6)


def work_s(cost: CostModel, chunks: tuple[int, ...]) -> list[float]:
    """Return times of the ranks of a chain."""
    return [row.seconds for row in rows_of(cost, BATON, (chunks,))]


@pytest.mark.parametrize(
    ("points", "latency_s"), [((), 1e-4), (((1e3, 3e-4),), 3e-4), (((1e3, 3e-4), (2e3, 2e-4)), 2.5e-4)]
)
def test_a_link_whose_bandwidth_does_not_show_keeps_the_former_one(
    points: tuple[tuple[float, float], ...], latency_s: float
) -> None:
    made = fit_chain(ORIGIN, chain_rows(), points, request_s=0.0)
    assert made.link.bandwidth == ORIGIN.link.bandwidth
    assert made.link.latency_s == pytest.approx(latency_s, rel=0.01)


def test_a_latency_is_never_negative() -> None:
    assert measured_link([(1e9, 0.5)], LinkModel(1e-4, 1e9)) == LinkModel(0.0, 1e9)


def test_a_chain_whose_times_do_not_grow_is_refused() -> None:
    constant = [RankRow(n, 0, True, 1.0) for n in (100, 200, 400)]
    with pytest.raises(InvalidArgumentError, match="longer chunks took no longer: measure longer prompts"):
        fit_chain(ORIGIN, constant, (), request_s=0.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_numbers_that_nobody_can_have_measured_are_refused(bad: float) -> None:
    message = "must be above 0, and finite"
    with pytest.raises(InvalidArgumentError, match=message):
        fit_chain(ORIGIN, [*chain_rows(), RankRow(300, 0, True, bad)], MESSAGES, request_s=0.0)
    for points in ([(100.0, 1.0), (200.0, bad)], [(100.0, 1.0), (bad, 1.0)]):
        with pytest.raises(InvalidArgumentError, match=message):
            fit_prefill(points, 30, Kernel.CAUSAL)
        with pytest.raises(InvalidArgumentError, match=message):
            fit_link(points)
