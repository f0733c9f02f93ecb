"""Draining over gRPC: no new work, streams end by themselves, progress is told; and breakers that the view shows."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from baton.errors import BatonError, NotFoundError, UnavailableError
from baton.process.backoff import Backoff
from baton.rpc_status import translate_rpc_errors
from baton.sampling_params import SamplingParams
from baton.v1 import admin_pb2, orchestrator_pb2
from baton.v1.admin_pb2_grpc import AdminStub
from orchestrator.membership.breakers import Breakers, RetryBudget
from orchestrator.membership.view import Orders
from orchestrator.requests.config import OrchestratorConfig
from tests.support.clusters.clients import CLOCK
from tests.support.clusters.cluster import HASTY, BareCluster, cluster
from tests.support.engines.generation import prompt, reference_ids
from tests.support.eventually import eventually

if TYPE_CHECKING:
    from baton.v1.admin_pb2_grpc import AdminAsyncStub

pytestmark = pytest.mark.integration

SHORT = SamplingParams(max_tokens=4, seed=4, ignore_eos=True)
LONG = replace(SHORT, max_tokens=300)


async def drain(made: BareCluster, group: str) -> list[orchestrator_pb2.GroupState]:
    """All that it tells, to its end."""
    with translate_rpc_errors():
        return [state async for state in admin(made).Drain(admin_pb2.DrainRequest(group=group), timeout=60)]


async def undrain(made: BareCluster, group: str) -> orchestrator_pb2.GroupState:
    with translate_rpc_errors():
        return await admin(made).Undrain(admin_pb2.UndrainRequest(group=group), timeout=60)


def admin(made: BareCluster) -> "AdminAsyncStub":
    return AdminStub(made.channel)


async def requests_of(made: BareCluster, name: str) -> int:
    return made.members.load(name).num_requests


@pytest.fixture
async def pair() -> AsyncIterator[BareCluster]:
    """Two generation groups behind a chain."""
    async with cluster(num_groups=2, num_slots=2) as made:
        yield made


async def test_an_idle_group_is_drained_at_once(pair: BareCluster) -> None:
    (state,) = await drain(pair, "group-0")
    assert (state.name, state.is_drained, state.is_ready, state.num_requests) == ("group-0", True, False, 0)
    assert (await pair.metrics())['baton_group_drained{group="group-0",role="generate"}'] == 1


async def test_a_running_stream_ends_by_itself_and_new_work_goes_elsewhere(pair: BareCluster) -> None:
    call, answer, busy = await pair.held_up(pair.request(prompt(40), LONG))
    draining = asyncio.create_task(drain(pair, busy))
    await eventually(lambda: held(pair), lambda drained: drained == {busy})
    others = await asyncio.gather(*(pair.ask(pair.request(prompt(20), SHORT)) for _ in range(5)))
    assert [each.token_ids for each in others] == [reference_ids(pair.decoder, prompt(20), SHORT)] * 5
    pair.group_gates[int(busy[-1])].open()
    await answer.drain(call)
    states = await draining
    assert answer.token_ids == reference_ids(pair.decoder, prompt(40), LONG)
    assert [state.num_requests for state in (states[0], states[-1])] == [1, 0]
    assert states[-1].generation.num_free == states[-1].generation.num_slots == 2
    assert all(state.is_drained for state in states)


async def held(made: BareCluster) -> set[str]:
    """Groups that are drained."""
    return {group.name for group in (await made.state()).groups if group.is_drained}


async def test_without_another_group_new_work_waits_until_it_is_undone() -> None:
    async with cluster(num_ranks=1) as made:
        await drain(made, "group-0")
        waiting = asyncio.create_task(made.ask(made.request(prompt(20), SHORT)))
        await eventually(made.state, lambda state: state.num_running + state.num_queued == 1)
        assert await requests_of(made, "group-0") == 0
        assert not (await undrain(made, "group-0")).is_drained
        assert len((await waiting).token_ids) == SHORT.max_tokens


async def test_a_drained_chain_leaves_prefill_to_the_generation_groups_at_once() -> None:
    async with cluster(config=OrchestratorConfig(prefill_wait_s=1000.0)) as made:
        await drain(made, "chain")
        answer = await made.ask(made.request(prompt(40), SHORT))
        assert not answer.end.timings.prefill.ranks
        state = await made.state()
        assert list(state.why_degraded) == [
            "chain is drained",
            "no prefill group is ready: generation groups prefill by themselves",
        ]
        await undrain(made, "chain")
        answer = await made.ask(made.request(prompt(40), SHORT))
        assert answer.end.timings.prefill.ranks


async def test_a_drain_that_is_given_up_stays_and_one_that_is_undone_ends(pair: BareCluster) -> None:
    call, _, busy = await pair.held_up(pair.request(prompt(40), LONG))
    given_up = admin(pair).Drain(admin_pb2.DrainRequest(group=busy), timeout=60)
    await given_up.read()
    given_up.cancel()
    assert await held(pair) == {busy}
    draining = admin(pair).Drain(admin_pb2.DrainRequest(group=busy), timeout=60)
    told = aiter(draining)
    assert (await anext(told)).is_drained
    await undrain(pair, busy)
    assert not [state async for state in told][-1].is_drained
    call.cancel()


async def test_a_drain_of_a_group_that_goes_meanwhile_ends(pair: BareCluster) -> None:
    call, _, busy = await pair.held_up(pair.request(prompt(40), LONG))
    told = aiter(admin(pair).Drain(admin_pb2.DrainRequest(group=busy), timeout=60))
    first = await anext(told)
    view = pair.view()
    pair.members.update(replace(view, generation=tuple(g for g in view.generation if g.name != busy)))
    assert {state.num_requests for state in [first, *[state async for state in told]]} == {1}
    call.cancel()


async def test_a_drain_that_is_undone_while_it_is_told_ends_no_group(pair: BareCluster) -> None:
    operations = pair.server.orchestrator.operations
    pair.members.hear_kept(Orders(drained=frozenset({"group-0"})))
    async with aclosing(operations.drain("group-0", leave=True)) as states:
        assert (await anext(states)).is_drained
        pair.members.undrain("group-0")
        assert [state.is_drained async for state in states] == [False]
    assert pair.members.orders == Orders()


async def test_a_group_whose_worker_is_gone_has_nothing_left_to_do(pair: BareCluster) -> None:
    view = pair.view()
    dead = replace(view.generation[0], endpoint="127.0.0.1:1", ready=False)
    pair.members.update(replace(view, generation=(dead, *view.generation[1:])))
    (state,) = await drain(pair, "group-0")
    assert (state.is_drained, state.HasField("generation")) == (True, False)


async def test_a_group_is_wanted_again_once_the_supervisor_knows(pair: BareCluster) -> None:
    await drain(pair, "group-0")
    pair.members.hear_kept(pair.members.orders)
    undoing = asyncio.create_task(pair.server.orchestrator.operations.undrain("group-0"))
    done, _ = await asyncio.wait({undoing}, timeout=0.1)
    assert not done and pair.members.orders == Orders()
    pair.members.hear_kept(pair.members.orders)
    assert not (await asyncio.wait_for(undoing, 60)).is_drained


async def test_without_a_supervisor_no_group_leaves(pair: BareCluster) -> None:
    leaving = admin(pair).Drain(admin_pb2.DrainRequest(group="group-0", leave=True), timeout=60)
    with pytest.raises(UnavailableError, match="group-0 cannot leave"), translate_rpc_errors():
        _ = [state async for state in leaving]
    assert await held(pair) == {"group-0"}


async def test_an_unknown_group_is_refused_and_those_that_exist_are_named(pair: BareCluster) -> None:
    for ask in (drain, undrain):
        with pytest.raises(NotFoundError, match="there is no group group-7: name one of chain, group-0, group-1"):
            await ask(pair, "group-7")


async def test_a_chain_that_fails_again_and_again_is_kept_out_until_a_probe_goes_well() -> None:
    async with cluster(config=replace(HASTY, max_attempts=2)) as made:
        made.members.breakers = Breakers(CLOCK, 2, Backoff(0.2, 0.2))
        sound = made.view()
        (chain,) = sound.prefill
        broken = replace(sound, prefill=(replace(chain, endpoints=("127.0.0.1:1", chain.endpoints[1])),))
        made.members.update(broken)
        with pytest.raises(BatonError):
            await made.ask(made.request(prompt(40), SHORT))
        state = await made.state()
        assert state.groups[0].is_broken
        seen = await made.metrics()
        assert seen['baton_group_broken{group="chain",role="prefill"}'] == 1
        made.members.update(sound)  # another incarnation: its own breaker
        assert not (await made.state()).groups[0].is_broken
        answer = await made.ask(made.request(prompt(40), SHORT))
        assert answer.end.timings.prefill.ranks


async def test_a_group_that_is_kept_out_gets_one_attempt_after_its_pause_and_then_all() -> None:
    async with cluster(num_ranks=1) as made:
        made.members.breakers = Breakers(CLOCK, 1, Backoff(0.2, 10.0))
        made.members.failed(made.view().generation[0].incarnation)
        assert not made.members.view.generation[0].ready
        answers = await asyncio.gather(*(made.ask(made.request(prompt(20), SHORT)) for _ in range(3)))
        assert [len(each.token_ids) for each in answers] == [SHORT.max_tokens] * 3
        assert not (await made.state()).groups[-1].is_broken


async def test_a_retry_that_the_budget_does_not_allow_in_time_ends_the_request() -> None:
    async with cluster(config=HASTY) as made:
        await made.state()  # by now the first budget has been fitted to the groups' slots
        made.server.orchestrator.scheduler.budget = RetryBudget(CLOCK, share=0.0, burst=1, window_s=60.0)
        await made.ranks[0].stop()
        with pytest.raises(BatonError) as caught:
            await made.ask(made.request(prompt(40), SHORT))
        assert caught.value.retryable
        seen = await made.metrics()
        failures = [value for name, value in seen.items() if name.startswith("baton_attempt_failures_total")]
        assert sum(failures) == 2 < HASTY.max_attempts
