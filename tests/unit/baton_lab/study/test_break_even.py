"""When separate prefill pays, by hand: a rank takes 0.9 ms for a token, and 0.1 ms for a prompt. A step takes 20 ms,
whatever it runs, and with prefill 40 ms at most, so that a prompt of 100 tokens takes five.
"""

import math
from dataclasses import replace

import pytest

from baton.errors import InvalidArgumentError
from baton.planning.cost_model import CostModel, LinkModel
from baton.planning.local_prefill import LocalPrefill
from baton.planning.planner import ChainPlanner
from baton_lab.study.break_even import BreakEven, Demand, Pools, Side, Span
from tests.support.clusters.planners import deciding_planner, linear_planner, planner_of

ONE_OF_EACH = Pools(num_groups=1, num_ranks=1, num_engines=1, num_slots=8)
DEMAND = Demand(prompt_tokens=100, output_tokens=11, rate=1.0)
SELDOM = replace(DEMAND, rate=1e-9)
ALONE_S = 0.0901
"""A prompt of 100 tokens on a rank, or an engine without rows."""


def over(link: LinkModel, *, speed: float = 1.0, kv_bytes: int = 0, max_ranks: int = 1) -> ChainPlanner:
    """The planner of this page, with that link, and engines that compute at `speed` times a rank's."""
    cost = CostModel(num_layers=10, linear_s=1e-4, pair_s=0.0, kv_bytes=kv_bytes, project_share=0.0, link=link)
    return planner_of(cost, max_ranks=max_ranks, local=LocalPrefill(speed, 256))


def first(side: Side) -> float:
    return side.first_s


def test_chains_leave_steps_undisturbed() -> None:
    apart = BreakEven(deciding_planner(), ONE_OF_EACH).apart(DEMAND)
    assert apart is not None
    num_rows = 1.0 * 10 * 0.02  # requests a second, steps of each, seconds of a step
    assert apart.num_rows == pytest.approx(num_rows)
    assert apart.terms.prefill_s == pytest.approx(ALONE_S)
    assert apart.terms.steps_s == pytest.approx(num_rows * 0.02 / 2)  # half a step, in that part of the time
    assert (apart.terms.transfer_s, apart.num_ranks) == (0.0, 1)
    assert apart.token_s == apart.step_s == apart.longest_step_s == 0.02
    assert apart.prefill_load == pytest.approx(ALONE_S)
    assert apart.answer_s == pytest.approx(ALONE_S + num_rows * 0.01 + 10 * 0.02)


def test_engines_prefill_between_their_steps_and_lose_that_time() -> None:
    even = BreakEven(deciding_planner(), ONE_OF_EACH)
    together = even.together(DEMAND)
    assert together is not None
    assert even.num_together == 2.0  # so each gets half a request a second
    token_s = 0.02 / (1 - 0.5 * ALONE_S)
    num_rows = 0.5 * 10 * token_s
    assert together.token_s == pytest.approx(token_s)
    assert together.num_rows == pytest.approx(num_rows)
    assert together.terms.prefill_s == pytest.approx(ALONE_S)
    assert together.terms.steps_s == pytest.approx(num_rows * 7.5 * 0.02)
    assert together.longest_step_s == pytest.approx(0.02 + 0.16 * ALONE_S)
    assert together.prefill_load == pytest.approx(0.5 * (ALONE_S + num_rows * 0.15))
    assert together.answer_s == pytest.approx(ALONE_S + num_rows * 0.15 + 10 * token_s)


def test_a_side_carries_a_rate_until_a_pool_is_full() -> None:
    even = BreakEven(deciding_planner(), ONE_OF_EACH)
    apart, together = even.capacities(DEMAND)
    assert apart == pytest.approx(1 / ALONE_S)
    assert together == pytest.approx(2 / (ALONE_S + 0.15))  # beside rows, each prompt takes seven steps and a half
    for rate, carried in ((together - 0.01, (True, True)), (together + 0.01, (True, False)), (12.0, (False, False))):
        assert tuple(side is not None for side in even.sides(replace(DEMAND, rate=rate))) == carried
    few_slots = BreakEven(deciding_planner(), replace(ONE_OF_EACH, num_slots=1))
    most, _ = few_slots.capacities(DEMAND)
    # A slot is held from the prefill on: ALONE_S, half a step in the part of the time that has rows, and ten steps.
    assert most * (ALONE_S + 0.2 + min(1, 0.2 * most) * 0.01) == pytest.approx(1.0)


def test_the_prompt_from_which_on_a_transfer_pays() -> None:
    # Engines are half as fast, and a hand-over takes three latencies of 10 ms: it pays where a prompt takes over 30 ms.
    even = BreakEven(over(LinkModel(0.01), speed=0.5), ONE_OF_EACH)
    turn = math.floor((0.03 - 1e-4) / 9e-4)
    assert even.by_prompt(SELDOM, first) == (Span(16, turn, "together"), Span(turn + 1, 8192, "apart"))


def test_the_transfer_is_what_the_link_does_not_hide_behind_computing() -> None:
    # 10 kB a token in ten layers. At 1e8 bytes/s the last layer's are 1 ms of 100 tokens; at 5e6, all less the prefill.
    for bandwidth, transfer_s in ((1e8, 0.001), (5e6, 0.2 - ALONE_S)):
        apart = BreakEven(over(LinkModel(0.0, bandwidth), kv_bytes=1000), ONE_OF_EACH).apart(SELDOM)
        assert apart is not None and apart.terms.transfer_s == pytest.approx(transfer_s)


def test_the_rate_from_which_on_undisturbed_prefill_pays() -> None:
    even = BreakEven(over(LinkModel(0.01)), ONE_OF_EACH)
    before, after, beyond = even.by_rate(DEMAND, first)
    assert (before.better, after.better, beyond.better) == ("together", "apart", "only apart")
    assert (beyond.last, beyond.first) == pytest.approx(even.capacities(DEMAND), rel=1e-3)
    # With r requests a second, 30 ms and half a step in 0.2 r of the time are as long as seven steps and a half in
    # r / 10 / (1 - r ALONE_S / 2) of the time.
    a, b, c = -0.002 * ALONE_S / 2, 0.002 - 0.03 * ALONE_S / 2 - 0.015, 0.03
    turn = (-b - math.sqrt(b * b - 4 * a * c)) / (2 * a)
    assert before.last == pytest.approx(turn, rel=1e-3) and after.first == pytest.approx(turn, rel=1e-3)


def test_more_ranks_prefill_faster_and_carry_no_more_than_their_share() -> None:
    two = BreakEven(over(LinkModel(), max_ranks=2), replace(ONE_OF_EACH, num_ranks=2))
    apart = two.apart(DEMAND)
    assert apart is not None and apart.num_ranks == 2 and two.num_together == 3.0
    assert apart.terms.prefill_s < 0.6 * ALONE_S
    assert 0.5 * ALONE_S <= apart.prefill_load < 0.6 * ALONE_S
    group_pairs = BreakEven(over(LinkModel(), max_ranks=2), replace(ONE_OF_EACH, num_ranks=2, num_groups=2)).apart(
        DEMAND
    )
    assert group_pairs is not None and group_pairs.prefill_load == pytest.approx(apart.prefill_load / 2)


def test_prompts_of_which_neither_side_carries_any() -> None:
    even = BreakEven(deciding_planner(), ONE_OF_EACH)
    spans = even.by_prompt(replace(DEMAND, rate=5.0), first)
    assert [span.better for span in spans[-2:]] == ["only apart", "neither"]
    assert spans[-2].last + 1 == spans[-1].first == math.ceil((0.2 - 1e-4) / 9e-4) and spans[-1].last == 8192
    assert even.capacities(replace(DEMAND, prompt_tokens=8192, output_tokens=10**6))[0] < 0.01


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (lambda: Pools(num_ranks=0), "num_ranks = 0 is out of range"),
        (lambda: replace(DEMAND, rate=-1.0), "rate = -1.0 is out of range"),
        (lambda: replace(DEMAND, prompt_tokens=0), "prompt_tokens = 0 is out of range"),
        (
            lambda: BreakEven(linear_planner(), ONE_OF_EACH),
            "the planner has no configuration of local prefill",
        ),
        (lambda: BreakEven(deciding_planner(), Pools()), "num_ranks = 2: the planner plans 1 at most"),
    ],
)
def test_what_cannot_be_compared_is_refused(broken: "object", text: str) -> None:
    assert callable(broken)
    with pytest.raises(InvalidArgumentError, match=text):
        broken()
