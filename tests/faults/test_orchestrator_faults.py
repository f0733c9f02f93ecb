"""Workers that die while an orchestrator uses them. The stream continues or ends with the documented error, and no
resource is held afterwards."""

import asyncio
from dataclasses import replace

import pytest

from baton.errors import BatonError, InvalidArgumentError, UnavailableError
from baton.sampling_params import SamplingParams
from baton.v1 import generate_pb2
from orchestrator.membership.view import ClusterView
from tests.support.clusters.clients import Answer
from tests.support.clusters.cluster import HASTY, BareCluster, cluster
from tests.support.engines.generation import prompt, reference_ids
from tests.support.eventually import eventually
from tests.support.models.reference import check_equal_tokens
from tests.support.models.tiny_tokenizer import text_of

pytestmark = pytest.mark.integration

PARAMS = SamplingParams(max_tokens=60, temperature=0.8, seed=3, presence_penalty=0.5, ignore_eos=True)
SHORT = replace(PARAMS, max_tokens=8)


async def test_a_stream_goes_on_exactly_when_its_generation_group_dies() -> None:
    async with cluster(num_groups=2) as made:
        for gate in made.group_gates:
            gate.shut(num_passes=4 * made.decoder.config.num_layers)
        call, answer = made.open(made.request(prompt(40), PARAMS)), Answer()
        await answer.read(call, 5)
        lost = await made.busy_group()
        await made.lose_group(lost)
        await answer.drain(call)
        assert answer.token_ids == reference_ids(made.decoder, prompt(40), PARAMS)
        assert answer.indices == list(range(PARAMS.max_tokens))
        assert answer.text == text_of(answer.token_ids)
        assert answer.end.usage.num_attempts == 2
        made.groups.pop(lost)


async def test_stop_strings_and_token_penalties_survive_a_lost_group() -> None:
    async with cluster(num_groups=2) as made:
        whole = reference_ids(made.decoder, prompt(40), PARAMS)
        stop = text_of(whole[40:42])
        expected = text_of(whole)[: text_of(whole).index(stop)]
        for gate in made.group_gates:
            gate.shut()
        call, answer = made.open(made.request(prompt(40), replace(PARAMS, stop=(stop,)))), Answer()
        await answer.read(call, 1)
        lost = await made.busy_group()
        await made.lose_group(lost)
        await answer.drain(call)
        assert answer.text == expected
        assert answer.finishes[0] == generate_pb2.FINISH_REASON_STOP
        made.groups.pop(lost)


async def test_many_streams_survive_a_lost_group() -> None:
    async with cluster(num_groups=2) as made:
        asked = [(prompt(10 + 7 * n), replace(PARAMS, seed=n)) for n in range(12)]
        for gate in made.group_gates:
            gate.shut()
        running = [asyncio.create_task(made.ask(made.request(ids, params))) for ids, params in asked]
        await eventually(made.state, lambda state: state.num_running == 12)
        stopping = asyncio.create_task(made.groups[0].stop())
        for gate in made.group_gates:
            gate.open()
        await stopping
        for (ids, params), answer in zip(asked, await asyncio.gather(*running), strict=True):
            assert answer.indices == list(range(params.max_tokens))
            check_equal_tokens(made.decoder, ids, answer.token_ids, params)
        made.groups.pop(0)


async def test_a_lost_rank_costs_an_attempt_once_the_chain_is_repaired() -> None:
    async with cluster() as made:
        made.rank_gates[1].shut()
        running = asyncio.create_task(made.ask(made.request(prompt(40), SHORT)))
        await made.rank_gates[1].until_reached()
        lost = made.ranks.pop()
        stopping = asyncio.create_task(lost.stop())
        made.members.update(made.view(prefill_ready=False))

        async def num_booked() -> int:
            return len(made.members.prefill_queues)

        await eventually(num_booked, lambda num: num == 0)
        made.rank_gates.pop().open()
        await stopping
        await made.add_rank()
        await made.start_epoch()
        made.members.update(made.view())
        answer = await running
        assert answer.token_ids == reference_ids(made.decoder, prompt(40), SHORT)
        assert answer.end.usage.num_attempts >= 2
        assert len(answer.end.timings.prefill.ranks) == 2


async def test_without_prefill_groups_the_generation_group_prefills_by_itself() -> None:
    async with cluster(config=HASTY) as made:
        made.members.update(made.view(prefill_ready=False))
        answer = await made.ask(made.request(prompt(40), SHORT))
        assert answer.token_ids == reference_ids(made.decoder, prompt(40), SHORT)
        assert (await made.state()).num_degraded == 1


async def test_a_chain_that_stays_broken_ends_the_request_with_its_error() -> None:
    async with cluster(config=HASTY) as made:
        await made.ranks.pop().stop()
        made.rank_gates.pop()
        made.members.update(replace_endpoints(made))
        with pytest.raises(BatonError) as caught:
            await asyncio.wait_for(made.ask(made.request(prompt(40), SHORT)), 20)
        assert caught.value.retryable


def replace_endpoints(made: BareCluster) -> ClusterView:
    """A view whose second rank is not there."""
    view = made.view()
    (group,) = view.prefill
    return replace(view, prefill=(replace(group, endpoints=(*group.endpoints, "127.0.0.1:1")),))


async def test_without_generation_groups_a_request_ends_in_bounded_time() -> None:
    async with cluster(config=HASTY) as made:
        made.members.update(ClusterView())
        with pytest.raises(UnavailableError, match="no generation group had a free slot"):
            await asyncio.wait_for(made.ask(made.request(prompt(40), SHORT)), 20)
        made.members.update(made.view())
        await made.ask(made.request(prompt(40), SHORT))


async def test_a_request_that_no_attempt_can_help_is_tried_once() -> None:
    async with cluster() as made:
        request = made.request(prompt(10), replace(SHORT, max_tokens=390))
        group = made.view().generation[0]
        made.members.update(replace(made.view(), generation=(replace(group, layout_fingerprint="other"),)))
        with pytest.raises(BatonError) as caught:
            await made.ask(request)
        assert not caught.value.retryable
        assert not isinstance(caught.value, InvalidArgumentError)


async def test_an_orchestrator_that_stops_tells_its_clients_to_come_back() -> None:
    async with cluster() as made:
        call, answer, _ = await made.held_up(made.request(prompt(40), replace(PARAMS, max_tokens=300)))
        stopping = asyncio.create_task(made.server.stop())
        with pytest.raises(UnavailableError, match="shutting down"):
            await answer.drain(call)
        made.group_gates[0].open()
        await stopping
        slots = made.groups[0].slots
        await eventually(lambda: asyncio.to_thread(slots.ledger), lambda held: held.num_active == 0)


async def test_a_stopping_orchestrator_lets_running_streams_end() -> None:
    async with cluster() as made:
        call, answer = made.open(made.request(prompt(40), PARAMS)), Answer()
        await answer.read(call, 1)
        stopping = asyncio.create_task(made.server.stop(grace_s=20))
        await answer.drain(call)
        await stopping
        assert len(answer.token_ids) == PARAMS.max_tokens


async def test_a_group_that_is_drained_ends_its_streams_and_gets_no_others() -> None:
    async with cluster(num_groups=2) as made:
        for gate in made.group_gates:
            gate.shut(num_passes=2 * made.decoder.config.num_layers)
        call, answer = made.open(made.request(prompt(40), replace(PARAMS, max_tokens=200))), Answer()
        await answer.read(call, 3)
        drained = await made.busy_group()
        view = made.view()
        groups = [replace(group, ready=index != drained) for index, group in enumerate(view.generation)]
        made.members.update(replace(view, generation=tuple(groups)))
        leaving = asyncio.create_task(made.groups[drained].stop(grace_s=30))  # as for a roll-out
        for gate in made.group_gates:
            gate.open()
        others = await asyncio.gather(*(made.ask(made.request(prompt(20), SHORT)) for _ in range(4)))
        assert all(len(each.token_ids) == SHORT.max_tokens for each in others)
        await answer.drain(call)
        await leaving
        assert len(answer.token_ids) == 200
        assert [each.finished.usage.num_attempts for each in (answer, *others) if each.finished] == [1] * 5
        made.groups.pop(drained)
