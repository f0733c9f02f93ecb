"""What a stream says of its attention holds: exact requests are never an approximate group's."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import InvalidArgumentError
from baton.proto_types import timings_from_proto
from baton.sampling_params import SamplingParams
from baton.types import RequestId
from generate_workers.residency.traits import POLICIES
from orchestrator.membership.view import ClusterView, GenerationGroup
from orchestrator.placement.chooser import NoGroupError
from orchestrator.placement.options import able_groups
from orchestrator.requests.record import Finished, RequestRecord, Started
from orchestrator.requests.request import Request
from tests.support.clusters.cluster import HASTY, BareCluster, cluster
from tests.support.engines.generation import prompt
from tests.support.engines.prefixes import blocks_in

pytestmark = pytest.mark.integration

PARAMS = SamplingParams(max_tokens=6, seed=4, ignore_eos=True)
SPEC = Request(RequestId("r"), prompt(20), PARAMS)
EXACT = GenerationGroup("e", "h:1", "layout", num_slots=4, max_slot_tokens=100, residency="device")
APPROXIMATE = replace(EXACT, name="a", endpoint="h:2", residency="infinigen", is_approximate=True)


@pytest.fixture
async def running() -> AsyncIterator[BareCluster]:
    async with cluster(num_ranks=0, num_groups=2, config=replace(HASTY, generation_wait_s=0.2)) as made:
        yield made


def say(running: BareCluster, *approximate: int) -> None:
    """To the orchestrator, as a supervisor: these groups choose keys."""
    groups = [
        replace(group, residency="infinigen", is_approximate=True) if index in approximate else group
        for index, group in enumerate(running.view().generation)
    ]
    running.members.update(replace(running.view(), generation=tuple(groups)))


def chosen(*groups: GenerationGroup, exact: bool) -> GenerationGroup | None:
    record = RequestRecord.of(Request(RequestId("r"), (1, 2, 3), PARAMS, exact=exact), received_ns=0)
    return next(iter(able_groups(ClusterView(generation=groups), record)), None)


def test_only_exact_groups_are_chosen_for_exact_requests() -> None:
    assert chosen(APPROXIMATE, EXACT, exact=True) == EXACT
    assert chosen(APPROXIMATE, exact=True) is None
    assert chosen(APPROXIMATE, EXACT, exact=False) == APPROXIMATE


async def test_where_all_groups_are_exact_so_is_every_answer(running: BareCluster) -> None:
    answer = await running.ask(running.request(prompt(20), PARAMS))
    assert answer.started.exact
    assert timings_from_proto(answer.end.timings).residency == ""


async def test_an_approximate_answer_says_so_and_names_the_policy(running: BareCluster) -> None:
    say(running, 0, 1)
    answer = await running.ask(running.request(prompt(20), PARAMS))
    assert not answer.started.exact
    assert timings_from_proto(answer.end.timings).residency == "infinigen"
    assert answer.end.usage.num_output_tokens == PARAMS.max_tokens


async def test_exact_is_refused_where_every_group_is_approximate(running: BareCluster) -> None:
    say(running, 0, 1)
    with pytest.raises(
        InvalidArgumentError, match=r"exact is not available: all .* approximate \(residency infinigen\)"
    ):
        await running.ask(running.request(prompt(20), PARAMS, exact=True))


async def test_of_both_kinds_the_exact_serves_who_asks_for_it(running: BareCluster) -> None:
    say(running, 0)
    asked = [running.request(prompt(20 + index), PARAMS, exact=True) for index in range(4)]
    answers = await asyncio.gather(*(running.ask(request) for request in asked))
    assert all(answer.started.exact for answer in answers)
    assert [group.engine.status().num_steps > 0 for group in running.groups] == [False, True]
    assert not (await running.ask(running.request(prompt(20), PARAMS))).started.exact


async def test_what_was_said_at_the_start_binds_later_attempts(running: BareCluster) -> None:
    events = running.server.orchestrator.scheduler.generate(SPEC)
    started = await anext(events)
    assert isinstance(started, Started)
    assert started.exact
    say(running, 0, 1)  # before the request's task has run
    *_, finished = [event async for event in events]
    assert isinstance(finished, Finished)
    assert isinstance(finished.error, NoGroupError)
    assert "no exact generation group" in str(finished.error)
    running.members.update(running.view())


@pytest.mark.parametrize("residency", ["device", "int4"])
async def test_what_an_approximate_group_has_made_is_not_stored_for_others(folder: Path, residency: str) -> None:
    """Who shares a prefix may have asked for exact tokens."""
    config = replace(HASTY, block_tokens=16)
    fields = {"residency": residency}
    async with cluster(num_ranks=0, config=config, folders={"generate": folder}, generate=fields) as made:
        await made.ask(made.request(prompt(50), replace(PARAMS, max_tokens=40)))
        await made.until_empty()  # what is to be stored is by then
        assert bool(blocks_in(folder)) == (residency == "device")


async def test_metrics_and_state_name_each_group_s_policy(
    running: BareCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    residency = running.groups[1].engine.residency
    monkeypatch.setattr(residency, "traits", POLICIES["infinigen"])
    statuses = [group.generation for group in (await running.state()).groups if group.role == "generate"]
    assert [(each.residency, each.is_approximate) for each in statuses] == [("device", False), ("infinigen", True)]
    metrics = await running.metrics()
    name = 'baton_group_residency{attention="approximate",group="group-1",residency="infinigen"}'
    assert metrics[name] == 1
