"""Every possible failure in each phase of a request: the request is answered exactly or ends as documented, and no
resource is held afterwards."""

import asyncio
from dataclasses import replace

import pytest

from baton.errors import DeadlineExceededError, UnavailableError
from baton.v1 import admin_pb2, generate_pb2
from baton.v1.admin_pb2_grpc import AdminStub
from orchestrator import scheduler
from tests.support.clusters.clients import Answer, StreamCall
from tests.support.clusters.deadlines import Deadlines
from tests.support.clusters.phases import CONFIG, ENDING, IDS, PHASES, Scene, scene
from tests.support.engines.generation import reference_ids
from tests.support.eventually import eventually

pytestmark = pytest.mark.integration


async def check_answer(on: Scene, call: StreamCall, num_attempts: int, num_read: int = 0) -> Answer:
    """The struck request brings the tokens of one that nothing befell, each of them once, after those that were read
    before."""
    answer = Answer()
    await answer.drain(call)
    assert answer.token_ids == reference_ids(on.made.decoder, IDS, ENDING)[num_read:]
    assert answer.indices == list(range(num_read, ENDING.max_tokens))
    assert answer.end.usage.num_attempts == num_attempts
    return answer


@pytest.mark.parametrize("name", ["reserved", "chunk on rank 1", "transferring", "committing"])
async def test_a_generation_group_that_dies_costs_one_attempt(name: str) -> None:
    async with scene(num_groups=2, victim=ENDING) as on:
        call = await PHASES[name](on)
        lost = await on.made.busy_group()
        await on.made.groups[lost].stop()
        on.let_go()
        await check_answer(on, call, num_attempts=2)
        del on.made.groups[lost]


@pytest.mark.parametrize("name", ["reserved", "chunk on rank 1", "transferring", "committing"])
async def test_a_rank_that_dies_costs_one_attempt(name: str) -> None:
    """Its chain does not come back: the group prefills by itself, and that is counted."""
    async with scene(victim=ENDING, config=replace(CONFIG, prefill_wait_s=0.2)) as on:
        call = await PHASES[name](on)
        await on.made.ranks.pop().stop()
        on.made.members.update(on.made.view(prefill_ready=False))
        on.let_go()
        answer = await check_answer(on, call, num_attempts=2)
        assert not answer.end.timings.prefill.ranks
        assert (await on.made.state()).num_degraded == 1


async def test_a_rank_that_dies_disturbs_no_stream() -> None:
    async with scene(victim=ENDING) as on:
        call = await PHASES["decoding"](on)  # which reads two tokens
        await eventually(on.num_jobs, lambda number: number == 0)
        await on.made.ranks.pop().stop()
        on.made.members.update(on.made.view(prefill_ready=False))
        on.let_go()
        await check_answer(on, call, num_attempts=1, num_read=2)


@pytest.mark.parametrize("name", ["reserved", "chunk on rank 1", "transferring", "committing"])
async def test_a_deadline_that_passes_ends_the_request_with_its_usage(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = Deadlines(monkeypatch, scheduler)
    async with scene(victim=ENDING) as on:
        call, answer = await PHASES[name](on), Answer()
        assert any(await on.held())
        deadlines.let_pass()
        with pytest.raises(DeadlineExceededError, match="its deadline passed after 0 output tokens"):
            await answer.drain(call)
        assert answer.finishes[0] == generate_pb2.FINISH_REASON_DEADLINE
        assert (answer.end.usage.num_prompt_tokens, answer.end.usage.num_output_tokens) == (len(IDS), 0)


@pytest.mark.parametrize("name", ["queued", "reserved", "chunk on rank 1", "transferring", "committing", "decoding"])
async def test_an_orchestrator_that_ends_frees_all_and_the_next_one_answers(name: str) -> None:
    async with scene(victim=ENDING) as on:
        call = await PHASES[name](on)
        stopping = asyncio.create_task(on.made.server.stop())
        with pytest.raises(UnavailableError):
            await Answer().drain(call)
        on.let_go()
        await stopping
        await asyncio.gather(*on.others, return_exceptions=True)
        await on.until_free()
        async with on.made.serving(CONFIG):
            await check_answer(on, on.ask(), num_attempts=1)


@pytest.mark.parametrize("group", ["chain", "group-0"])
@pytest.mark.parametrize("name", ["reserved", "chunk on rank 1", "transferring"])
async def test_a_drain_waits_for_what_runs(name: str, group: str) -> None:
    async with scene(victim=ENDING) as on:
        call = await PHASES[name](on)
        draining = AdminStub(on.made.channel).Drain(admin_pb2.DrainRequest(group=group), timeout=60)
        told = aiter(draining)
        assert (await anext(told)).num_requests == 1
        on.let_go()
        await check_answer(on, call, num_attempts=1)
        assert [state.num_requests async for state in told][-1:] == [0]
