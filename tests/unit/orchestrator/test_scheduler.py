"""The orchestrator without gRPC: events in order and one end, whatever ends it. Its faults: tests/faults."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import pytest

from baton.errors import DeadlineExceededError, ResourceExhaustedError, UnavailableError
from baton.sampling_params import SamplingParams
from baton.types import FinishReason, RequestId, TokenEvent
from orchestrator.composition import build_orchestrator
from orchestrator.membership.members import Membership
from orchestrator.requests.record import Event, Finished, Started
from orchestrator.requests.request import Request
from orchestrator.scheduler import RequestScheduler
from tests.support.clusters.clients import CLOCK
from tests.support.clusters.cluster import HASTY, BareCluster, cluster
from tests.support.clusters.planners import linear_planner
from tests.support.engines.generation import prompt, reference_ids
from tests.support.wire.secret import SECRET

pytestmark = pytest.mark.integration

SPEC = Request(RequestId("r"), prompt(20), SamplingParams(max_tokens=6, seed=4, ignore_eos=True))
LONG = replace(SPEC, params=replace(SPEC.params, max_tokens=300))


@pytest.fixture
async def running() -> AsyncIterator[BareCluster]:
    async with cluster(num_slots=1, config=replace(HASTY, max_queued_requests=1)) as made:
        yield made


async def events_of(scheduler: RequestScheduler, spec: Request) -> list[Event]:
    return [event async for event in scheduler.generate(spec)]


async def test_a_stream_starts_brings_tokens_and_finishes(running: BareCluster) -> None:
    started, *tokens, finished = await events_of(running.server.orchestrator.scheduler, SPEC)
    assert started == Started(SPEC.request_id, num_prompt_tokens=20, seed=4)
    ids = [event.token.token_id for event in tokens if isinstance(event, TokenEvent) and event.token is not None]
    assert ids == reference_ids(running.decoder, SPEC.prompt_ids, SPEC.params)
    assert isinstance(finished, Finished)
    assert (finished.reasons, finished.error) == ((FinishReason.LENGTH,), None)
    ends = [event.finish for event in tokens if isinstance(event, TokenEvent)]
    assert ends == [None] * (len(ids) - 1) + [FinishReason.LENGTH]


async def test_a_closed_stream_is_cancelled_everywhere(running: BareCluster) -> None:
    async with aclosing(running.server.orchestrator.scheduler.generate(LONG)) as events:
        assert isinstance(await anext(events), Started)
        assert isinstance(await anext(events), TokenEvent)
    assert (await running.server.orchestrator.overview.state()).num_running == 0


async def test_a_request_that_is_closed_before_its_task_begins_leaves_the_queue(running: BareCluster) -> None:
    scheduler = running.server.orchestrator.scheduler
    events = scheduler.generate(LONG)
    await anext(events)  # Started is there without waiting for the task
    await events.aclose()
    assert (await running.server.orchestrator.overview.state()).num_running == 0


async def test_a_passed_deadline_is_the_end(running: BareCluster) -> None:
    *_, finished = await events_of(running.server.orchestrator.scheduler, replace(LONG, deadline_s=CLOCK.now_s()))
    assert isinstance(finished, Finished)
    assert finished.reasons == (FinishReason.DEADLINE,)
    assert isinstance(finished.error, DeadlineExceededError)


async def test_a_failure_is_in_the_end_and_is_told_to_whoever_supervises(running: BareCluster) -> None:
    told = asyncio.Event()
    members = Membership(on_failure=told.set)
    orchestrator = build_orchestrator(members, linear_planner(), CLOCK, secret=SECRET, config=HASTY)
    orchestrator.start()
    members.update(replace(running.view(), generation=()))
    *_, finished = await events_of(orchestrator.scheduler, SPEC)
    await orchestrator.close()
    assert isinstance(finished, Finished)
    assert (finished.reasons, type(finished.error).__mro__[1]) == ((FinishReason.ERROR,), UnavailableError)
    assert told.is_set()


async def test_a_full_queue_refuses_before_the_start(running: BareCluster) -> None:
    scheduler = running.server.orchestrator.scheduler
    async with aclosing(scheduler.generate(LONG)) as first, aclosing(scheduler.generate(LONG)) as second:
        await anext(first)
        await anext(second)
        with pytest.raises(ResourceExhaustedError):
            await anext(scheduler.generate(LONG))


async def test_a_closing_controller_ends_what_runs_and_refuses_what_comes(running: BareCluster) -> None:
    orchestrator = build_orchestrator(running.members, linear_planner(), CLOCK, secret=SECRET, config=HASTY)
    orchestrator.start()
    events = orchestrator.scheduler.generate(LONG)
    await anext(events)
    reading = asyncio.create_task(drained(events))
    await orchestrator.close()
    finished = await reading
    assert isinstance(finished, Finished)
    assert isinstance(finished.error, UnavailableError)
    with pytest.raises(UnavailableError, match="shutting down"):
        await anext(orchestrator.scheduler.generate(SPEC))
    await orchestrator.close()


async def drained(events: AsyncIterator[Event]) -> Event:
    """A stream's last event."""
    return [event async for event in events][-1]
