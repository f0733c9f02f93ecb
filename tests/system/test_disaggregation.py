"""Choice of the worker that prefills, on real workers. If the prefill group is busy, a short prompt is prefilled by its
generation group, between the steps of running sequences, and the reason is reported. Tokens are exact in both cases."""

import asyncio
from dataclasses import replace

import pytest

from baton.calls.requests import BY_CHAIN
from baton.proto_types import timings_from_proto
from baton.results.prefill_trace import Placement
from baton.sampling_params import SamplingParams
from orchestrator.requests.config import OrchestratorConfig
from tests.support.clusters.clients import Answer
from tests.support.clusters.cluster import BareCluster, cluster
from tests.support.clusters.planners import deciding_planner
from tests.support.engines.generation import prompt, reference_ids
from tests.support.eventually import eventually

pytestmark = pytest.mark.integration

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
LONG = replace(PARAMS, max_tokens=300)


def placement(answer: Answer) -> Placement:
    assert answer.finished is not None
    found = timings_from_proto(answer.finished.timings).prefill.placement
    assert found is not None
    return found


async def check(made: BareCluster, num_tokens: int, reason: str) -> Placement:
    """One request, exact, and prefilled where `reason` says."""
    answer = await made.ask(made.request(prompt(num_tokens), PARAMS))
    assert answer.token_ids == reference_ids(made.decoder, prompt(num_tokens), PARAMS)
    found = placement(answer)
    assert found.reason == reason
    assert answer.finished is not None
    assert found.is_local == (not answer.finished.timings.prefill.ranks)
    return found


async def test_a_short_prompt_beside_a_busy_chain_is_prefilled_by_its_group() -> None:
    in_order = OrchestratorConfig(elastic=False)  # else a short prompt would overtake
    async with cluster(planner=deciding_planner(max_ranks=2, slower=100.0), config=in_order) as made:
        await check(made, 30, "chain_faster")
        stream = made.open(made.request(prompt(20), LONG))
        rows = Answer()
        await rows.read(stream, 1)
        made.rank_gates[0].shut()
        busy = asyncio.create_task(made.ask(made.request(prompt(380), PARAMS)))
        await made.rank_gates[0].until_reached()
        found = await check(made, 40, "local_faster")  # while the chain stands still
        assert found.chain is not None and found.local is not None
        assert found.local.cost_s < found.chain.cost_s
        assert not busy.done()
        made.rank_gates[0].open()
        assert (await busy).token_ids == reference_ids(made.decoder, prompt(380), PARAMS)
        await rows.drain(stream)
        assert rows.token_ids == reference_ids(made.decoder, prompt(20), LONG)
        seen = await made.metrics()
        assert seen['baton_disagg_decisions_total{reason="local_faster"}'] == 1
        assert seen['baton_disagg_decisions_total{reason="chain_faster"}'] == 3
        assert seen['baton_predicted_over_measured_ratio_count{prediction="local_prefill"}'] == 1
        assert (await made.state()).num_degraded == 0


async def test_what_is_configured_is_done() -> None:
    fast = deciding_planner(speed=100.0, max_ranks=2)
    async with cluster(planner=fast, config=OrchestratorConfig(disaggregation="always")) as made:
        await check(made, 40, "always")
    slow = deciding_planner(speed=0.01, max_ranks=2)
    async with cluster(planner=slow, config=OrchestratorConfig(disaggregation="never")) as made:
        await asyncio.gather(*(check(made, num_tokens, "never") for num_tokens in (1, 40, 200)))


async def test_a_prompt_may_ask_for_a_chain() -> None:
    async with cluster(planner=deciding_planner(speed=100.0, max_ranks=2)) as made:
        await check(made, 40, "local_faster")
        answer = Answer()
        await answer.drain(made.stub.Generate(made.request(prompt(40), PARAMS), timeout=60, metadata=(BY_CHAIN,)))
        assert placement(answer).reason == "always"


async def test_a_chain_that_is_not_ready_is_waited_for_no_longer_than_prefill_by_the_group_takes() -> None:
    async with cluster(planner=deciding_planner(max_ranks=2), config=OrchestratorConfig(prefill_wait_s=600)) as made:
        made.members.update(made.view(prefill_ready=False))
        await check(made, 40, "none_ready")
        assert (await made.state()).num_degraded == 1
        await eventually(made.state, lambda state: state.num_running == 0)
        await made.until_empty()
