"""Predictions of prefills, and counts of drafts, from data that a running service reports."""

import asyncio
import dataclasses
import math
import statistics

import pytest

from baton import Client
from baton.planning.planner import ChainPlanner
from baton.results.timings import DraftCounts, SpeculationTrace
from baton.sampling_params import SamplingParams
from orchestrator.requests.config import OrchestratorConfig
from tests.support.clusters.clients import HOST, Answer
from tests.support.clusters.cluster import cluster
from tests.support.clusters.planners import costs_of, linear_planner, times
from tests.support.engines.generation import prompt
from tests.support.eventually import eventually

pytestmark = pytest.mark.integration

ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)
CONFIG = OrchestratorConfig(report_wait_s=10)
NUM_TRIES = 3
"""Number of tries. Other programs change how long prompts take, and so the errors of one try."""
WRONG = 20.0
"""How many times too much, or too little, is assumed."""


def assuming(factor: float) -> ChainPlanner:
    """Return a planner whose prefills take `factor` times as long as those of `linear_planner`, at first."""
    costs = costs_of(times(linear_planner().cost, factor))
    return ChainPlanner(costs, max_ranks=1, max_tokens=512)


async def answers(planner: ChainPlanner, count: int) -> list[Answer]:
    """To one prompt, again and again, from a chain of one rank: links hardly matter there."""
    async with cluster(num_ranks=1, planner=planner, config=CONFIG) as running:
        return [await running.ask(running.request(prompt(200), ONE_TOKEN)) for _ in range(count)]


def error(answer: Answer) -> float:
    """Of what was predicted for the chain, as the absolute logarithm of what it took over that."""
    assert answer.finished is not None
    timings = answer.finished.timings
    (rank,), (option,) = timings.prefill.ranks, timings.prefill.width.options
    return abs(math.log((rank.end_ns - rank.start_ns) / 1e9 / option.own_s))


@pytest.mark.parametrize("wrong", [1 / WRONG, WRONG], ids=["too fast", "too slow"])
async def test_the_error_falls_whatever_was_assumed(wrong: float) -> None:
    tries: list[list[float]] = []
    while not tries or statistics.median(tries[-1][4:]) >= math.log(WRONG) / 2:
        assert len(tries) < NUM_TRIES, tries
        found = assuming(1.0)
        await answers(found, 6)
        truth = found.cost.linear_s / found.nominal.prefill.linear_s
        tries.append([error(answer) for answer in await answers(assuming(truth * wrong), 12)])


async def test_a_streams_drafts_reach_the_client_and_the_metrics() -> None:
    """What streams tell of their drafts is in sum what their group counts."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, num_drafts=3, n=2)

    def answered(target: str, num_drafts: int) -> SpeculationTrace | None:
        with Client(target) as client:
            asked = dataclasses.replace(params, num_drafts=num_drafts)
            completion = client.generate(token_ids=prompt(30 + num_drafts), params=asked).collect()
        assert completion.timings is not None
        return completion.timings.speculation

    async with cluster(num_slots=8, generate={"speculation": "auto"}) as running:
        target = f"{HOST}:{running.server.port}"
        traces = [await asyncio.to_thread(answered, target, num) for num in (0, 2, 5)]
        assert traces.pop(0) is None
        told: dict[str, DraftCounts] = {}
        for trace in traces:
            assert trace is not None and 2 < trace.num_steps < 2 * params.max_tokens
            for each in trace.sources:
                told[each.source] = told.get(each.source, DraftCounts(each.source)) + each

        def agree(seen: dict[str, float]) -> bool:
            drafts = {
                f'baton_drafts_total{{end="{end}",group="group-0",source="{name}"}}': num
                for name, each in told.items()
                for end, num in (("accepted", each.num_accepted), ("rejected", each.num_drafted - each.num_accepted))
            }
            rounds = {
                f'baton_draft_rounds_total{{group="group-0",source="{name}"}}': each.num_rounds
                for name, each in told.items()
            }
            return all(seen.get(name) == num for name, num in (drafts | rounds).items())

        await eventually(running.metrics, agree)
        assert told["streaming"].num_accepted > 0
