"""Step times: equal to what was measured on the grid, to the roofline between and beyond, and never falling."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError, InvalidArgumentError
from baton.planning.hardware import cpu_rank
from baton.planning.planner import ChainPlanner
from baton.planning.step_times import StepTimes, dumps, load, loads, nominal_steps, save, tabulate
from baton.planning.work_cost import StepWork, WorkCost
from baton.types import TokenRange
from baton_lab.study.known_models import SHAPES
from tests.support.clusters.planners import linear_planner

SHAPE = SHAPES["smollm2-135m"]
ASSUMED = nominal_steps("smollm2-135m", "2 cores", SHAPE, cpu_rank(2, SHAPE.dtype_bytes))
TRUE = WorkCost(step_s=0.013, token_s=0.4e-3, key_s=2.3e-6, pair_s=0.3e-6)
BATCHES, CONTEXTS = (1, 4, 16), (192, 1024, 4096)
BENT = ((0.013, 0.014, 0.019), (0.016, 0.021, 0.05), (0.03, 0.06, 0.17))
"""Times as a machine may measure them."""


def table(seconds: tuple[tuple[float, ...], ...] = BENT) -> StepTimes:
    return tabulate(ASSUMED, BATCHES, CONTEXTS, seconds)[0]


def true_table() -> tuple[StepTimes, float]:
    seconds = [[TRUE.plain_s(batch, context) for context in CONTEXTS] for batch in BATCHES]
    return tabulate(ASSUMED, BATCHES, CONTEXTS, seconds)


def test_on_the_grid_the_measured_times_count() -> None:
    for (batch, row), (place, context) in itertools.product(zip(BATCHES, BENT, strict=True), enumerate(CONTEXTS)):
        assert table().step_s(batch, context) == pytest.approx(row[place])


@given(batch=st.floats(1, 64), context=st.floats(192, 10_000))
def test_a_roofline_is_found_exactly_between_and_beyond(batch: float, context: float) -> None:
    made, residual = true_table()
    assert residual < 1e-6
    assert made.step_s(batch, context) == pytest.approx(TRUE.plain_s(batch, context), rel=1e-6)


@given(batch=st.floats(1, 16), context=st.floats(192, 4096))
def test_between_equals_two_interpolations_one_after_the_other(batch: float, context: float) -> None:
    by_batch = [np.interp(context, CONTEXTS, row) for row in BENT]
    assert table().step_s(batch, context) == pytest.approx(float(np.interp(batch, BATCHES, by_batch)))


def test_below_the_grid_the_nearest_time_counts() -> None:
    assert table().step_s(4, 0) == table().step_s(4, 192)
    narrow, _ = tabulate(ASSUMED, (4, 8), (192,), ((0.02,), (0.03,)))
    assert narrow.step_s(1, 192) == pytest.approx(0.02)
    assert narrow.step_s(6, 5000) == pytest.approx(0.025)


POINT = st.tuples(st.floats(1, 100), st.floats(0, 20_000))
TIMES = st.lists(st.floats(1e-3, 1.0), min_size=9, max_size=9)


@given(one=POINT, other=POINT, times=TIMES)
def test_more_never_takes_less_whatever_was_measured(
    one: tuple[float, float], other: tuple[float, float], times: list[float]
) -> None:
    made, _ = tabulate(ASSUMED, BATCHES, CONTEXTS, [times[at : at + 3] for at in (0, 3, 6)])
    low, high = map(min, zip(one, other, strict=True)), map(max, zip(one, other, strict=True))
    assert made.step_s(*low) <= made.step_s(*high) * (1 + 1e-9)


@pytest.mark.parametrize(("batches", "contexts"), [((1,), (192,)), ((1, 8), (192,)), ((8,), (192, 500))])
def test_one_of_a_kind_makes_a_table_too(batches: tuple[int, ...], contexts: tuple[int, ...]) -> None:
    seconds = [[TRUE.plain_s(batch, context) for context in contexts] for batch in batches]
    made, residual = tabulate(ASSUMED, batches, contexts, seconds)
    assert residual < 0.01
    assert made.step_s(batches[-1], contexts[-1]) == pytest.approx(seconds[-1][-1])
    assert made.step_s(50, 9000) >= seconds[-1][-1]


def test_a_residual_says_how_far_the_roofline_is_off() -> None:
    made, residual = tabulate(ASSUMED, BATCHES, CONTEXTS, BENT)
    off = [
        abs(made.cost.plain_s(batch, context) / seconds - 1)
        for batch, row in zip(BATCHES, BENT, strict=True)
        for context, seconds in zip(CONTEXTS, row, strict=True)
    ]
    assert residual == pytest.approx(max(off)) and residual > 0.01


def test_what_is_assumed_reads_weights_and_kv_once() -> None:
    assert not ASSUMED.is_measured and table().is_measured
    rates = cpu_rank(2, SHAPE.dtype_bytes)
    weights = SHAPE.num_layers * SHAPE.layer_weights + SHAPE.vocab * SHAPE.hidden
    assert 130e6 < weights < 140e6
    read = 2 * weights + 8 * 1000 * 23_040
    computed = 8 * 2 * weights
    expected = read / rates.memory_bandwidth + computed / rates.linear_flops
    assert ASSUMED.step_s(8, 1000) == pytest.approx(expected)
    pairs = ASSUMED.cost.seconds(StepWork(8, 8000, 24_000)) - expected
    assert pairs == pytest.approx(16_000 * SHAPE.num_layers * SHAPE.pair_flops / rates.pair_flops)


def test_a_mixture_reads_more_experts_with_more_tokens() -> None:
    """The assumed time lies within a fifth of the time to read, for as many tokens as it is made for."""
    shape = dataclasses.replace(SHAPE, ffn=SHAPE.ffn // 4, num_experts=64, num_active_experts=4)
    rates = dataclasses.replace(cpu_rank(2, SHAPE.dtype_bytes), linear_flops=1e18)
    cost = nominal_steps("mixture", "cpu", shape, rates).cost
    assert cost.step_s == pytest.approx(2 * shape.step_weights / rates.memory_bandwidth)
    for num_tokens in (1, 4, 8, 16):
        read_s = 2 * shape.read_weights(num_tokens) / rates.memory_bandwidth
        assert cost.step_s + (num_tokens - 1) * cost.token_s == pytest.approx(read_s, rel=0.2)


def test_rounds_of_drafts_tell_what_pairs_cost() -> None:
    """Without any, pairs cost what was assumed; with some, the table tells it too, and predicts them."""
    plain, residual = true_table()
    assert plain.cost.pair_s == ASSUMED.cost.pair_s
    drafts = [StepWork(3 * rows, 3 * rows * 256, 3 * rows * 256, num_steps=3) for rows in BATCHES]
    rounds = [StepWork(4 * rows, 1000 * rows, 4000 * rows) + each for rows, each in zip(BATCHES, drafts, strict=True)]
    seconds = [[TRUE.plain_s(batch, context) for context in CONTEXTS] for batch in BATCHES]
    made, residual = tabulate(ASSUMED, BATCHES, CONTEXTS, seconds, [(each, TRUE.seconds(each)) for each in rounds])
    assert residual < 1e-6
    assert made.cost.seconds(rounds[1]) == pytest.approx(TRUE.seconds(rounds[1]))
    assert made.cost.pair_s == pytest.approx(TRUE.pair_s, rel=1e-3)
    off = [(each, 2 * TRUE.seconds(each)) for each in rounds]
    assert tabulate(ASSUMED, BATCHES, CONTEXTS, seconds, off)[1] > 0.1


def test_rounds_tell_what_rows_cost_where_the_table_has_one_kind() -> None:
    rounds = [
        StepWork(1 + drafts, 500, 500 * (1 + drafts)) + StepWork(drafts, drafts * 64, drafts * 64, drafts)
        for drafts in (1, 3, 6)
    ]
    made, _ = tabulate(ASSUMED, (1,), (500,), [[TRUE.plain_s(1, 500)]], [(each, TRUE.seconds(each)) for each in rounds])
    for each in rounds:
        assert made.cost.seconds(each) == pytest.approx(TRUE.seconds(each), rel=1e-3)


def test_weights_of_fewer_bytes_are_read_in_less_time() -> None:
    halved = nominal_steps("smollm2-135m", "2 cores", SHAPE, cpu_rank(2, SHAPE.dtype_bytes), weight_bytes=1)
    assert halved.cost.step_s == pytest.approx(ASSUMED.cost.step_s / 2)
    assert (halved.cost.token_s, halved.cost.key_s) == (ASSUMED.cost.token_s, ASSUMED.cost.key_s)


@pytest.mark.parametrize(("batch", "context"), [(0, 5), (float("nan"), 5), (1, -1), (1, float("inf"))])
def test_steps_that_do_not_exist_are_refused(batch: float, context: float) -> None:
    for times in (ASSUMED, table()):
        with pytest.raises(InvalidArgumentError, match="give one row or more"):
            times.step_s(batch, context)


@pytest.mark.parametrize("times", [ASSUMED, table()], ids=["nominal", "measured"])
def test_a_table_survives_the_file(tmp_path: Path, times: StepTimes) -> None:
    save(times, tmp_path / "steps.json")
    assert load(tmp_path / "steps.json") == times == loads(dumps(times), "text")


def test_fingerprint_is_of_model_and_engine_and_not_of_measurements() -> None:
    assert table().fingerprint == ASSUMED.fingerprint and len(ASSUMED.fingerprint) == 16
    others = [
        dataclasses.replace(ASSUMED, model="other"),
        dataclasses.replace(ASSUMED, hardware="4 cores"),
        dataclasses.replace(ASSUMED, shape=SHAPES["llama-7b"]),
    ]
    assert len({ASSUMED.fingerprint, *(other.fingerprint for other in others)}) == 4


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("schema", 1, "schema = 1, and this version reads 2: recreate the file"),
        ("kind", "baton-calibration", "is not a baton-step-times file"),
        ("model", "", "model = '' is not a text"),
        ("shape", {"ffn": 3}, "shape: num_layers is missing"),
        ("cost", {"step_s": 1, "token_s": -1, "key_s": 0, "pair_s": 0}, "cost: token_s = -1.0 is out of range"),
        ("cost", {"step_s": 1, "token_s": 1, "key_s": 1}, "cost: pair_s = None is not a number"),
        ("batches", [4, 1, 16], r"batches = \(4, 1, 16\) do not ascend from 1"),
        ("batches", [0, 1, 16], "do not ascend from 1"),
        ("batches", [1, 16], "seconds are not one for each"),
        ("batches", [], "seconds are not one for each"),
        ("contexts", [192, 1024.5, 4096], "contexts is not a list of whole numbers"),
        ("contexts", None, "contexts is not a list of whole numbers"),
        ("seconds", [[1, 2, 3]], "seconds are not one for each"),
        ("seconds", 3, "seconds is not a list of lists of numbers"),
        ("seconds", [[1, 1, 1], [1, 1, 1], [1, 1, float("nan")]], "seconds are out of range: give finite"),
        ("seconds", [[1, 1, 1], [1, 1, 1], [1, 1, 0]], "seconds are out of range: give finite"),
        ("hardware", "an abacus", "fingerprint does not match"),
    ],
)
def test_bad_files_are_refused_by_field(tmp_path: Path, field: str, value: Any, text: str) -> None:
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({**json.loads(dumps(table())), field: value}))
    with pytest.raises(ConfigError, match=f"steps.json: .*{text}"):
        load(path)


def test_a_planner_knows_step_times() -> None:
    calibration = linear_planner().calibration
    planner = ChainPlanner(calibration, max_ranks=1, max_tokens=64, steps=table())
    assert planner.step_s(16, 4096) == pytest.approx(0.17)
    assert planner.chunks(TokenRange(0, 3), 1)
    with pytest.raises(ConfigError, match="knows no step times"):
        linear_planner().step_s(1, 1)
