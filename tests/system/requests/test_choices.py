"""Several choices, echo and prompt logprobs, through clients, orchestrator, prefill group and generation group."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from baton import AsyncClient, Client
from baton.errors import InvalidArgumentError, ResourceExhaustedError
from baton.results.completion import Completion
from baton.sampling_params import SamplingParams
from baton.types import FinishReason
from orchestrator.requests.config import OrchestratorConfig
from tests.support.clusters.clients import HOST, Answer
from tests.support.clusters.cluster import BareCluster, cluster
from tests.support.engines.generation import prefilled, prompt, reference_ids
from tests.support.eventually import eventually
from tests.support.models.tiny_tokenizer import BOS_ID, ids_of, text_of

pytestmark = pytest.mark.integration

PARAMS = SamplingParams(max_tokens=12, temperature=0.9, seed=2**64 - 2, n=4, ignore_eos=True)
IDS = prompt(40)


@pytest.fixture
async def running() -> AsyncIterator[BareCluster]:
    async with cluster() as made:
        yield made


@pytest.fixture
async def client(running: BareCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(f"{HOST}:{running.server.port}") as made:
        yield made


def outputs_of(output: Completion) -> list[list[int]]:
    return [[token.token_id for token in choice.tokens] for choice in output.choices]


def expected(running: BareCluster, params: SamplingParams) -> list[list[int]]:
    return [reference_ids(running.decoder, IDS, params.of_choice(choice)) for choice in range(params.n)]


async def test_one_prefill_gives_every_choice_its_own_seed_s_output(running: BareCluster, client: AsyncClient) -> None:
    output = await client.generate(token_ids=IDS, params=PARAMS).collect()
    assert outputs_of(output) == expected(running, PARAMS)
    assert [choice.text for choice in output.choices] == [text_of(ids) for ids in outputs_of(output)]
    assert [choice.finish for choice in output.choices] == [FinishReason.LENGTH] * 4
    assert output.usage is not None
    assert (output.usage.num_prompt_tokens, output.usage.num_output_tokens) == (40, 48)
    assert [rank.engine.status().num_jobs_done for rank in running.ranks] == [1, 1]


async def test_a_choice_alone_is_the_same(running: BareCluster, client: AsyncClient) -> None:
    several = await client.generate(token_ids=IDS, params=PARAMS).collect()
    alone = await client.generate(token_ids=IDS, params=replace(PARAMS, n=1, seed=1)).collect()
    assert outputs_of(alone) == [outputs_of(several)[3]]


async def test_a_thread_gets_choices(running: BareCluster) -> None:
    def ask() -> Completion:
        with Client(f"{HOST}:{running.server.port}") as client:
            stream = client.generate(token_ids=IDS, params=PARAMS)
            ends = [event.choice for event in stream if event.finish is not None]
            assert sorted(ends) == [0, 1, 2, 3]
            return stream.output

    assert outputs_of(await asyncio.to_thread(ask)) == expected(running, PARAMS)


async def test_choices_of_many_requests_do_not_mix(running: BareCluster, client: AsyncClient) -> None:
    asked = [replace(PARAMS, seed=100 * number, n=1 + number % 4) for number in range(10)]
    outputs = await asyncio.gather(*(client.generate(token_ids=IDS, params=params).collect() for params in asked))
    for params, output in zip(asked, outputs, strict=True):
        assert outputs_of(output) == expected(running, params)


async def test_a_client_that_leaves_takes_all_choices_along(running: BareCluster, client: AsyncClient) -> None:
    stream = client.generate(token_ids=IDS, params=replace(PARAMS, max_tokens=300))
    await anext(aiter(stream))
    stream.cancel()
    await running.until_empty()


async def test_choices_that_wait_count_as_many_slots() -> None:
    config = OrchestratorConfig(max_queued_requests=1)
    async with cluster(num_slots=4, config=config) as made:
        first = made.open(made.request(IDS, replace(PARAMS, n=1, max_tokens=300)))
        await Answer().read(first, 1)
        made.group_gates[0].shut()
        waiting = asyncio.create_task(made.ask(made.request(IDS, PARAMS)))
        await eventually(made.state, lambda state: state.num_queued == 1)
        later = made.request(IDS, replace(PARAMS, n=2))
        with pytest.raises(ResourceExhaustedError):
            await made.ask(later, timeout_s=90)  # were it due first, it would run at once, in slots that are free
        made.group_gates[0].open()
        first.cancel()
        answer = await waiting
        assert [answer.token_ids, *(answer.others[choice] for choice in (1, 2, 3))] == expected(made, PARAMS)


async def test_choices_go_on_each_for_itself_when_their_group_dies() -> None:
    params = replace(PARAMS, max_tokens=60, n=3)
    async with cluster(num_groups=2) as made:
        for gate in made.group_gates:
            gate.shut(num_passes=4 * made.decoder.config.num_layers)
        call, answer = made.open(made.request(IDS, params)), Answer()
        await answer.read(call, 2)
        lost = await made.busy_group()
        await made.lose_group(lost)
        await answer.drain(call)
        assert [answer.token_ids, answer.others[1], answer.others[2]] == expected(made, params)
        assert answer.text == text_of(answer.token_ids)
        assert answer.finished is not None
        assert answer.finished.usage.num_attempts == 2
        made.groups.pop(lost)


@pytest.mark.parametrize("n", [0, 65])
async def test_a_number_of_choices_out_of_range_is_refused(n: int) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"sampling\.n = {n} is out of range"):
        SamplingParams(n=n)


async def test_more_choices_than_a_group_has_slots_are_refused(client: AsyncClient) -> None:
    with pytest.raises(InvalidArgumentError, match=r"sampling\.n = 17 is out of range: a group here has 16 slots"):
        await client.generate(token_ids=IDS, params=replace(PARAMS, n=17)).collect()


async def test_echo_begins_each_choice_with_the_prompt(running: BareCluster, client: AsyncClient) -> None:
    output = await client.generate("Hello there", echo=True, params=replace(PARAMS, n=2)).collect()
    ids = [reference_ids(running.decoder, ids_of("Hello there"), PARAMS.of_choice(choice)) for choice in range(2)]
    assert [choice.text for choice in output.choices] == ["Hello there" + text_of(each) for each in ids]
    output = await client.generate(token_ids=[BOS_ID, *ids_of("abc")], echo=True, params=replace(PARAMS, n=1)).collect()
    assert output.text.startswith("<s>abc")


async def test_echo_of_a_chat_is_refused(client: AsyncClient) -> None:
    with pytest.raises(InvalidArgumentError, match="echo with chat"):
        await client.generate(messages=[{"role": "user", "content": "x"}], echo=True).collect()


async def test_prompt_logprobs_come_with_the_first_token(running: BareCluster, client: AsyncClient) -> None:
    params = SamplingParams(max_tokens=3, prompt_logprobs=2, logprobs=1, n=2, ignore_eos=True)
    output = await client.generate(token_ids=IDS, params=params).collect()
    _, logits_TV = prefilled(running.decoder, IDS)
    scores_TV = logits_TV.double().log_softmax(-1)
    assert [token.token_id for token in output.prompt] == list(IDS)
    assert output.prompt[0].logprob is None
    found = [token.logprob for token in output.prompt[1:]]
    assert found == pytest.approx([float(scores_TV[at, token_id]) for at, token_id in enumerate(IDS[1:])], abs=1e-4)
    assert all(len(token.top) == 2 for token in output.prompt[1:])
    assert [rank.engine.status().num_jobs_done for rank in running.ranks] == [0, 0]
    assert (await running.state()).num_degraded == 0


async def test_a_prompt_is_scored_without_output(client: AsyncClient) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=2, logprobs=1, n=2)
    found = await client.generate(token_ids=prompt(20), params=params, echo=True).collect()
    scored = await client.generate(token_ids=prompt(20), params=replace(params, max_tokens=1), echo=True).collect()
    assert found.prompt == scored.prompt and len(found.prompt) == 20
    for choice in found.choices:
        assert (choice.text, choice.tokens, choice.finish) == (text_of(prompt(20)), (), FinishReason.LENGTH)
    assert found.usage is not None and found.usage.num_output_tokens == 0
