"""What a chain's timings tell: computation without waits, messages, and what a request takes besides its chain."""

import dataclasses
import itertools

import pytest

from baton.errors import InvalidArgumentError
from baton.planning.calibration import nominal
from baton.planning.cost_model import CostModel, LinkModel
from baton.planning.hardware import cpu_rank
from baton.planning.planner import ChainPlanner
from baton.results.prefill_trace import RankTiming
from baton.types import TokenRange
from baton_lab.study.known_models import SHAPES
from deploy.tuning.calibration.chains import (
    Sample,
    evaluate,
    fitted_lengths,
    lengths_between,
    link_points,
    rank_rows,
)

SHAPE = SHAPES["smollm2-135m"]
ASSUMED = nominal("smollm2-135m", "a core", SHAPE, cpu_rank(1, SHAPE.dtype_bytes))
REQUEST_S = 0.02
TRUE = CostModel(
    30, 40e-6, 20e-9, SHAPE.kv_bytes, SHAPE.project_share, fixed_s=1e-3, head_s=REQUEST_S, link=LinkModel(2e-4, 1e9)
)
"""What the timings below are made of; the assumed costs differ."""
PLANNER = ChainPlanner(dataclasses.replace(ASSUMED, cost=TRUE), max_ranks=2, max_tokens=4096)


def timed(*lengths: int, slower: float = 1.0, num_ranks: int = 2) -> Sample:
    """What such chunks' ranks would report if their costs were TRUE: the second waits as long as it must."""
    chunks = tuple(TokenRange(*edge) for edge in itertools.pairwise(itertools.accumulate(lengths, initial=0)))
    ttft_s = PLANNER.ttft_s(chunks) * slower
    compute_s = [slower * each for each in PLANNER.rank_s(chunks)]
    ranks = []
    for rank, tokens in enumerate(chunks):
        is_last = rank == len(chunks) - 1
        end_s = ttft_s - slower * REQUEST_S if is_last else compute_s[rank]
        num_bytes = 0 if is_last else 30 * tokens.end * SHAPE.kv_bytes
        ranks.append(
            RankTiming(
                rank=rank,
                tokens=tokens,
                start_ns=0,
                end_ns=round(end_s * 1e9),
                wait_s=end_s - compute_s[rank],
                push_start_ns=0,
                push_end_ns=0,
                num_bytes_pushed=0,
                num_bytes_sent=num_bytes,
                layers=(),
                num_messages_sent=0 if is_last else 30,
                send_s=0.0 if is_last else 30 * TRUE.link.seconds(num_bytes / 30),
            )
        )
    return Sample(chunks[-1].end, ttft_s, tuple(ranks), num_ranks)


SAMPLES = [
    timed(round(0.6 * n), n - round(0.6 * n), slower=1 + noise) for n in (64, 256, 1024, 4096) for noise in (0, 0.4, 0)
]
"""One in three is disturbed."""


def test_costs_are_found_although_some_prompts_were_disturbed() -> None:
    outcome = evaluate(ASSUMED, [*SAMPLES, timed(300, 212)], fitted=(64, 256, 1024, 4096))
    cost = outcome.calibration.cost
    assert outcome.calibration.is_measured and outcome.calibration.fingerprint == ASSUMED.fingerprint
    assert [cost.linear_s, cost.pair_s, cost.fixed_s] == pytest.approx([40e-6, 20e-9, 1e-3], rel=1e-3)
    assert [cost.link.latency_s, cost.link.bandwidth] == pytest.approx([2e-4, 1e9], rel=1e-3)
    assert cost.head_s == pytest.approx(REQUEST_S, rel=1e-3)
    assert outcome.residual < 1e-3


def test_lengths_that_were_not_fitted_are_told_apart_and_judged_alone() -> None:
    outcome = evaluate(ASSUMED, [*SAMPLES, timed(300, 212, slower=1.25)], fitted=(64, 256, 1024, 4096))
    assert [(check.num_tokens, check.is_fitted) for check in outcome.checks] == [
        (64, True), (256, True), (512, False), (1024, True), (4096, True),
    ]  # fmt: skip
    assert outcome.checks[2].error == pytest.approx(1 / 1.25 - 1, rel=1e-3)
    assert outcome.median_error == pytest.approx(0.2, rel=1e-3)
    assert outcome.checks[0].former_s != pytest.approx(outcome.checks[0].predicted_s, rel=0.05)


def test_a_prompt_that_left_ranks_idle_is_predicted_and_not_fitted() -> None:
    outcome = evaluate(ASSUMED, [*SAMPLES, timed(32, slower=0.7)], fitted=(32, 64, 256, 1024, 4096))
    assert outcome.residual < 1e-3
    assert (outcome.checks[0].chunks, outcome.checks[0].is_fitted) == ((32,), False)
    with pytest.raises(InvalidArgumentError, match="fewer than two lengths were divided among 2 ranks: give longer"):
        evaluate(ASSUMED, [timed(32), timed(64), timed(200, 100)], fitted=(32, 64, 300))


def test_a_rows_seconds_are_the_median_of_equal_chunks_without_their_waits() -> None:
    rows = rank_rows(SAMPLES)
    assert len(rows) == 8 and sum(row.is_last for row in rows) == 4
    assert {(row.tokens, row.before) for row in rows if row.is_last} == {(26, 38), (102, 154), (410, 614), (1638, 2458)}
    first = next(row for row in rows if row.tokens == 2458)
    assert first.seconds == pytest.approx(PLANNER.rank_s((TokenRange(0, 2458), TokenRange(2458, 4096)))[0])


def test_a_chain_of_one_rank_tells_costs_and_no_link() -> None:
    alone = [timed(length) for length in (64, 256, 1024)]
    assert link_points(alone) == ()
    cost = evaluate(ASSUMED, alone, fitted=(64, 256, 1024)).calibration.cost
    assert cost.link == ASSUMED.cost.link
    assert cost.linear_s == pytest.approx(40e-6, rel=1e-3)


@pytest.mark.parametrize("max_tokens", [512, 2048, 8192])
def test_lengths_double_and_leave_room_for_output(max_tokens: int) -> None:
    lengths = fitted_lengths(max_tokens)
    assert len(lengths) == 6 and lengths[-1] < max_tokens
    assert all(high // 2 == low for low, high in itertools.pairwise(lengths))
    between = lengths_between(lengths)
    assert len(between) == 5 and not set(between) & set(lengths)
    assert all(low < each < high for each, (low, high) in zip(between, itertools.pairwise(lengths), strict=True))


def test_a_model_too_small_for_lengths_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="requests have 256 tokens at most, too few for 6 prompt lengths"):
        fitted_lengths(256)


def test_the_outcome_says_when_no_prompt_took_all_ranks_of_the_group() -> None:
    narrow = [timed(n, num_ranks=4) for n in (64, 256)] + [timed(n - n // 3, n // 3, num_ranks=4) for n in (512, 1024)]
    outcome = evaluate(ASSUMED, narrow, fitted=(64, 256, 512, 1024))
    assert (outcome.width, outcome.num_ranks) == (2, 4)
    assert [check.is_fitted for check in outcome.checks] == [False, False, True, True]
    assert evaluate(ASSUMED, SAMPLES, fitted=(64, 256, 1024, 4096)).num_ranks == 2
