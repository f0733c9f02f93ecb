"""Both clients with the real orchestrator and real workers: equal tokens, a restarted orchestrator, no leaks."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from baton import AsyncClient, Client
from baton.errors import InvalidArgumentError
from baton.results.completion import Completion
from baton.sampling_params import SamplingParams
from baton.types import FinishReason
from tests.support.clusters.clients import HOST
from tests.support.clusters.cluster import BareCluster, cluster
from tests.support.engines.generation import prompt, reference_ids
from tests.support.models.tiny_tokenizer import text_of
from tests.support.wire.late_streams import late_stream

pytestmark = pytest.mark.integration

SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, seed=7, ignore_eos=True)
LONG = replace(SAMPLED, max_tokens=300)


@pytest.fixture
async def running() -> AsyncIterator[BareCluster]:
    async with cluster() as made:
        yield made


def target_of(running: BareCluster) -> str:
    return f"{HOST}:{running.server.port}"


def ids_of(output: Completion) -> list[int]:
    return [token.token_id for token in output.tokens]


async def test_sixteen_streams_of_one_client_equal_one_process(running: BareCluster) -> None:
    asked = [(prompt(5 + 17 * n), replace(SAMPLED, seed=n)) for n in range(16)]
    async with AsyncClient(target_of(running)) as client:
        outputs = await asyncio.gather(
            *(client.generate(token_ids=ids, params=params).collect() for ids, params in asked)
        )
    for (ids, params), output in zip(asked, outputs, strict=True):
        assert ids_of(output) == reference_ids(running.decoder, ids, params)
        assert (output.text, output.finish) == (text_of(ids_of(output)), FinishReason.LENGTH)


async def test_a_thread_gets_text_usage_and_timings(running: BareCluster) -> None:
    def ask() -> Completion:
        with Client(target_of(running)) as client:
            return client.generate("Hello there", max_tokens=4, ignore_eos=True).collect()

    output = await asyncio.to_thread(ask)
    assert output.usage is not None and output.usage.num_output_tokens == 4
    assert output.timings is not None and (output.timings.time_to_first_token_s or 0) > 0
    assert len(output.timings.prefill.ranks) == 2


async def test_a_stream_outlives_its_controller(running: BareCluster) -> None:
    async with AsyncClient(target_of(running)) as client:
        stream = client.generate(token_ids=prompt(30), params=LONG)
        for _ in range(3):
            await anext(stream)
        await running.restart()
        output = await asyncio.wait_for(stream.collect(), 60)
    assert output.num_resumes >= 1
    assert ids_of(output) == reference_ids(running.decoder, prompt(30), LONG)
    assert output.text == text_of(ids_of(output))


async def test_a_cancelled_stream_leaves_nothing(running: BareCluster) -> None:
    async with AsyncClient(target_of(running)) as client:
        async with client.generate(token_ids=prompt(30), params=LONG) as stream:
            await anext(stream)
        await running.until_empty()


async def test_a_deadline_brings_usage(running: BareCluster) -> None:
    running.group_gates[0].shut()
    try:
        async with AsyncClient(target_of(running)) as client:
            stream = await late_stream(client, prompt(30), LONG)
    finally:
        running.group_gates[0].open()
    assert (stream.finish, stream.usage is not None) == (FinishReason.DEADLINE, True)


async def test_a_refusal_names_the_field(running: BareCluster) -> None:
    async with AsyncClient(target_of(running)) as client:
        for stream, named in (
            (client.generate(""), "prompt"),
            (client.generate("Hi", model="other"), "model"),
            (client.generate(token_ids=[10**6]), "token_ids"),
            (client.generate(b"x" * (9 * 2**20)), "prompt"),
        ):
            with pytest.raises(InvalidArgumentError, match=named):
                await stream.collect()
