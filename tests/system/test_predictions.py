"""Predictions by what a running service tells: of its chains while it serves, of its generation steps when asked."""

import asyncio
import dataclasses
import math
import random
import statistics

import pytest

from baton import Client
from baton.sampling_params import SamplingParams
from deploy.calibration.steps import NUM_STEPS, Grid, measure_steps
from planning.planner import ChainPlanner
from tests.support.clusters.orchestrators import HOST, MAX_TOKENS, Answer, relay
from tests.support.clusters.planners import linear_planner
from tests.support.engines.generation import prompt

ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)


def assuming(times: float) -> ChainPlanner:
    """By costs that nobody has measured."""
    by_hand = linear_planner().calibration
    assumed = dataclasses.replace(by_hand, prefill_points=(), cost=by_hand.cost.times(times))
    return ChainPlanner(assumed, max_ranks=1, max_tokens=512)


async def answers(planner: ChainPlanner, count: int) -> list[Answer]:
    """To one prompt, again and again, from a chain of one rank: links hardly matter there."""
    async with relay(num_ranks=1, planner=planner) as running:
        return [await running.ask(running.request(prompt(200), ONE_TOKEN)) for _ in range(count)]


def error(answer: Answer) -> float:
    """Of what was predicted for the chain, as the absolute logarithm of what it took over that."""
    assert answer.finished is not None
    timings = answer.finished.timings
    (rank,), (option,) = timings.prefill.ranks, timings.prefill.width.options
    return abs(math.log((rank.end_ns - rank.start_ns) / 1e9 / option.own_s))


@pytest.mark.parametrize("wrong", [1 / 20, 20.0], ids=["too fast", "too slow"])
async def test_the_error_falls_whatever_was_assumed(wrong: float) -> None:
    found = assuming(1.0)
    await answers(found, 6)
    truth = found.cost.linear_s / found.calibration.cost.linear_s
    errors = [error(answer) for answer in await answers(assuming(truth * wrong), 12)]
    assert statistics.median(errors[4:]) < errors[0] / 2, errors


async def test_a_measured_calibration_stays_as_it_is() -> None:
    planner = linear_planner()
    await answers(planner, 2)
    assert planner.cost == planner.calibration.cost


async def test_steps_are_measured_in_batches_that_fill_the_group_and_leave_nothing() -> None:
    """Rows that did not run in step would be refused."""
    grid = Grid((1, 3, 8), (40, MAX_TOKENS - NUM_STEPS // 2))
    done: list[int] = []

    def measured(target: str) -> list[list[float]]:
        with Client(target) as client:
            return measure_steps(client, grid, repeats=2, rng=random.Random(1), done=done.append)

    async with relay(num_slots=8) as running:
        seconds = await asyncio.to_thread(measured, f"{HOST}:{running.server.port}")
        await running.until_empty()
    assert [len(row) for row in seconds] == [2, 2, 2] and all(each > 0 for row in seconds for each in row)
    assert sum(done) == 2 * sum(map(grid.work, grid.cells))
