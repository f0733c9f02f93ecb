"""What a scrape brings after real requests, and how a request's time is divided."""

import asyncio
import re
import urllib.request
from dataclasses import replace
from pathlib import Path
from wsgiref.simple_server import WSGIServer

import pytest

from baton.calls.cluster_state import ClusterState, StepSample
from baton.errors import BatonError, ConfigError, InvalidArgumentError, ResourceExhaustedError
from baton.planning.step_cost import LearntCosts
from baton.planning.work_cost import WorkCost
from baton.process.clock import SystemClock
from baton.results.prefill_trace import PrefillTrace, RankTiming
from baton.results.stages import first_token_stages
from baton.results.timings import Timings
from baton.sampling_params import SamplingParams
from baton.types import TokenRange
from orchestrator.observability.journal import Journal
from orchestrator.observability.metrics import Metrics
from orchestrator.observability.metrics_server import MetricsServer
from orchestrator.observability.traces import Traces
from orchestrator.requests.config import AutoscalingConfig, OrchestratorConfig
from tests.support.clusters.cluster import HASTY, cluster
from tests.support.clusters.planners import deciding_planner
from tests.support.engines.generation import prompt
from tests.support.eventually import eventually
from tests.support.folders import ROOT

pytestmark = pytest.mark.integration

PARAMS = SamplingParams(max_tokens=6, seed=4, ignore_eos=True)
LONG = replace(PARAMS, max_tokens=300)
MS = 1_000_000
STATE = ClusterState((), num_queued=0, num_running=0, num_degraded=0, version="v")


def rank(number: int, start_ms: int, end_ms: int, push_end_ms: int) -> RankTiming:
    start_ns, end_ns, push_end_ns = start_ms * MS, end_ms * MS, push_end_ms * MS
    return RankTiming(number, TokenRange(0, 1), start_ns, end_ns, 0.0, start_ns, push_end_ns, 0, 0, ())


def timings(marks_ms: tuple[int, int, int, int], *ranks: RankTiming) -> Timings:
    received, admitted, leased, first = (mark * MS for mark in marks_ms)
    return Timings(received, admitted, leased, first, first + 1, prefill=PrefillTrace(ranks=ranks))


@pytest.mark.parametrize(
    ("given", "parts_ms"),
    [
        (
            timings((1000, 1010, 1015, 1100), rank(0, 1020, 1060, 1070), rank(1, 1020, 1080, 1092)),
            {"queue": 10, "placement": 5, "prefill": 65, "transfer": 12, "insert": 8},
        ),
        (timings((1000, 1010, 1015, 1100)), {"queue": 10, "placement": 5, "prefill": 85}),
        (
            timings((1000, 1000, 1000, 1100), rank(0, 500, 900, 1300)),
            {"queue": 0, "placement": 0, "prefill": 0, "transfer": 100, "insert": 0},
        ),
        (timings((1000, 1010, 1200, 1100)), {}),
        (timings((1000, 1010, 1015, 0)), {}),
        (timings((1000, 1010, 0, 1100)), {}),
    ],
    ids=["a chain", "by itself", "clocks apart", "an earlier attempt's token", "no token", "no slot"],
)
def test_time_to_first_token_is_divided_without_rest(given: Timings, parts_ms: dict[str, int]) -> None:
    parts = {stage: (at.end_ns - at.start_ns) / 1e9 for stage, at in first_token_stages(given)}
    assert parts == pytest.approx({stage: part_ms / 1000 for stage, part_ms in parts_ms.items()})
    if parts:
        assert sum(parts.values()) == pytest.approx(given.time_to_first_token_s)


async def test_requests_are_counted_with_their_tokens_times_and_decisions() -> None:
    async with cluster() as made:
        for _ in range(2):
            await made.ask(made.request(prompt(40), PARAMS))
        await made.ask(made.request(prompt(10), replace(PARAMS, n=2)))
        with pytest.raises(InvalidArgumentError):
            await made.ask(made.request(prompt(10), replace(PARAMS, n=99)))
        await made.until_empty()
        seen = await made.metrics()
    assert seen["baton_requests_total"] == 3
    assert seen['baton_choices_total{reason="length"}'] == 4
    assert seen['baton_tokens_total{type="input"}'] == 90
    assert seen['baton_tokens_total{type="output"}'] == 24
    assert seen["baton_attempts_total"] == 3
    assert seen['baton_disagg_decisions_total{reason="not_predicted"}'] == 3
    for name in ("time_to_first_token", "time_per_output_token", "request_duration"):
        assert seen[f"baton_{name}_seconds_count"] == 3
    assert seen["baton_request_duration_seconds_sum"] > seen["baton_time_to_first_token_seconds_sum"] > 0
    parts = [seen[f'baton_first_token_stage_seconds_sum{{stage="{stage}"}}'] for stage in STAGES]
    assert sum(parts) == pytest.approx(seen["baton_time_to_first_token_seconds_sum"])
    assert seen['baton_prefill_rank_seconds_count{rank="0"}'] >= 2
    assert seen['baton_predicted_over_measured_ratio_count{prediction="prefill"}'] == 3
    assert seen["baton_kv_pushed_bytes_total"] == seen["baton_kv_shared_bytes_total"] > 0


STAGES = ("queue", "placement", "prefill", "transfer", "insert")


async def test_steps_are_held_against_what_was_predicted_for_them() -> None:
    name = 'baton_predicted_over_measured_ratio_count{prediction="generation_step"}'
    async with cluster() as made:

        async def after_another() -> dict[str, float]:
            await made.ask(made.request(prompt(40), PARAMS))  # steps between two looks at the group
            return await made.metrics()

        seen = await eventually(after_another, lambda seen: seen.get(name, 0) > 0)
        assert seen['baton_predicted_over_measured_ratio_sum{prediction="generation_step"}'] > 0


STEP = StepSample(duration_s=0.5, num_rows=4, context_tokens=100)
COSTS = LearntCosts(WorkCost(0.2, 0.1, 1e-3, 9.0), WorkCost(9.0, 9.0, 9.0, 9.0), 9.0, 7)


@pytest.mark.parametrize(
    ("change", "costs", "ratios"),
    [
        ({}, COSTS, {"generation_step": (0.2 + 4 * 0.1 + 400 * 1e-3) / 0.5}),
        ({}, None, {}),
        ({"num_rows": 0}, COSTS, {}),
        ({"num_prefill_tokens": 3}, COSTS, {}),
        ({"num_drafts": 2, "predicted_s": 0.25}, COSTS, {"draft_round": 0.5}),
        ({"num_drafts": 2, "predicted_s": 0.25}, None, {"draft_round": 0.5}),
        ({"num_drafts": 2}, COSTS, {}),
    ],
    ids=["plain", "nothing learnt", "no rows", "with prefill", "drafts", "drafts alone", "drafts not predicted"],
)
def test_a_step_is_held_against_the_costs_of_its_group(
    change: dict[str, float], costs: LearntCosts | None, ratios: dict[str, float]
) -> None:
    journal, step = Journal(SystemClock(), Traces()), StepSample()
    step.CopyFrom(STEP)
    for name, value in change.items():
        setattr(step, name, value)
    journal.stepped(step, costs)
    (family,) = [each for each in journal.metrics.registry.collect() if "predicted_over_measured" in each.name]
    sums = {each.labels["prediction"]: each.value for each in family.samples if each.name.endswith("_sum")}
    assert sums == pytest.approx(ratios)


async def test_rounds_of_drafts_are_held_against_what_their_group_predicted() -> None:
    name = 'baton_predicted_over_measured_ratio_count{prediction="draft_round"}'
    async with cluster(generate={"speculation": "streaming"}) as made:
        drafting = replace(PARAMS, num_drafts=2, max_tokens=60)

        async def after_another() -> dict[str, float]:
            await made.ask(made.request(prompt(40), drafting))  # steps between two looks at the group
            return await made.metrics()

        seen = await eventually(after_another, lambda seen: seen.get(name, 0) > 0)
        assert seen['baton_round_seconds{group="group-0",kind="measured"}'] > 0


async def test_a_request_that_is_not_taken_is_counted_by_why() -> None:
    async with cluster(num_slots=1, config=replace(HASTY, max_queued_requests=1)) as made:
        made.group_gates[0].shut()
        calls = [made.open(made.request(prompt(20), LONG)) for _ in range(2)]
        await eventually(made.state, lambda state: (state.num_running, state.num_queued) == (1, 1))
        with pytest.raises(ResourceExhaustedError):
            await made.ask(made.request(prompt(20), PARAMS))
        seen = await made.metrics()
        assert seen['baton_requests_refused_total{error="ResourceExhaustedError"}'] == 1
        assert (seen["baton_queue_requests"], seen["baton_queue_tokens"], seen["baton_running_requests"]) == (1, 20, 1)
        for call in calls:
            call.cancel()
        await eventually(made.state, lambda state: state.num_running + state.num_queued == 0)
        made.group_gates[0].open()
        await made.until_empty()
        assert (await made.metrics())['baton_requests_total{error="RequestCancelledError"}'] == 2


async def test_failed_attempts_and_prefills_without_a_chain_are_counted() -> None:
    async with cluster(config=HASTY) as made:
        made.members.update(made.view(prefill_ready=False))
        await made.ask(made.request(prompt(40), PARAMS))
        seen = await made.metrics()
        assert seen['baton_disagg_decisions_total{reason="none_ready"}'] == seen["baton_degraded_prefills_total"] == 1
        assert (seen["baton_degraded"], seen["baton_serving"]) == (1, 1)
        made.members.update(replace(made.view(), prefill=()))
        await made.ask(made.request(prompt(40), PARAMS))
        made.members.update(made.view())
        await made.ask(made.request(prompt(40), replace(PARAMS, prompt_logprobs=1)))
        await made.ranks[0].stop()
        with pytest.raises(BatonError):
            await made.ask(made.request(prompt(40), PARAMS))
        seen = await made.metrics()
        assert seen['baton_disagg_decisions_total{reason="no_prefill_groups"}'] == 1
        assert seen['baton_disagg_decisions_total{reason="prompt_scores"}'] == 1
        failures = [value for name, value in seen.items() if name.startswith("baton_attempt_failures_total")]
        assert sum(failures) == HASTY.max_attempts
        assert seen["baton_requests_total"] == 3


async def test_slots_and_bytes_add_up_at_every_scrape_while_requests_come_and_go() -> None:
    async with cluster(num_slots=4, config=OrchestratorConfig(poll_s=0.01)) as made:
        params = replace(PARAMS, max_tokens=60)
        made.group_gates[0].shut()
        asked = [asyncio.create_task(made.ask(made.request(prompt(40 + n), params))) for n in range(12)]
        active = 'baton_slots{group="group-0",state="active"}'
        await eventually(made.metrics, lambda seen: seen.get(active, 0) > 0)
        made.group_gates[0].open()
        while not all(task.done() for task in asked):
            seen = await made.metrics()
            slots = {state: seen[f'baton_slots{{group="group-0",state="{state}"}}'] for state in STATES}
            num_bytes = [seen[f'baton_kv_bytes{{group="group-0",state="{state}"}}'] for state in STATES]
            kv = made.groups[0].slots.memory.limits.kv_bytes
            assert (sum(slots.values()), sum(num_bytes)) == (4, kv)
            assert seen['baton_ledger_imbalance{group="group-0"}'] == 0
        await asyncio.gather(*asked)
        await made.until_empty()
        seen = await made.metrics()
        assert seen['baton_slots{group="group-0",state="free"}'] == 4
        assert seen['baton_group_leaked{group="group-0",role="generate"}'] == 0


async def test_what_earlier_prompts_left_is_counted_where_it_is_kept_and_used(folder: Path) -> None:
    config = OrchestratorConfig(block_tokens=16)
    async with cluster(num_ranks=1, config=config, folders={"prefill": folder}, prefix_bytes=2**20) as made:
        await made.ask(made.request(prompt(40), PARAMS))
        await made.ask(made.request((*prompt(40)[:36], *prompt(9, seed=1)), PARAMS))
        name = 'baton_prefix_store_bytes{group="chain"}'
        seen = await eventually(made.metrics, lambda seen: seen.get(name, 0) > 0)
    assert seen["baton_cached_tokens_total"] == 32
    assert seen['baton_prefix_store_limit_bytes{group="chain"}'] == 2**20


STATES = ("free", "leased", "active", "quarantined")


async def test_the_page_names_exactly_what_there_is() -> None:
    config = OrchestratorConfig(autoscaling=AutoscalingConfig(mode="advise", interval_s=0.05))
    async with cluster(num_ranks=1, config=config, planner=deciding_planner()) as made:
        await eventually(made.metrics, lambda seen: "baton_scaling_forecast_rate" in seen)
        families = await made.scrape()
    there = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert set(re.findall(r"`(baton_[a-z_]+)", page)) == {name for name in there if not name.endswith("_created")}


async def test_a_port_in_use_is_refused_with_a_remedy() -> None:
    first = await MetricsServer.start(Metrics().registry, lambda: STATE, host="127.0.0.1", port=0)
    try:
        with pytest.raises(ConfigError, match="choose another metrics_port"):
            await MetricsServer.start(Metrics().registry, lambda: STATE, host="127.0.0.1", port=first.port)
    finally:
        await first.stop()
        await first.stop()


async def test_its_server_ends_without_waiting_for_the_next_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = WSGIServer.serve_forever
    monkeypatch.setattr(WSGIServer, "serve_forever", lambda server: serve(server, poll_interval=100.0))
    server = await MetricsServer.start(Metrics().registry, lambda: STATE, host="127.0.0.1", port=0)
    with await asyncio.to_thread(urllib.request.urlopen, f"http://{server.endpoint}/metrics", timeout=60):
        await asyncio.wait_for(server.stop(), 60)
