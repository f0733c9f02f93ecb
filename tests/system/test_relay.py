"""`baton local` with real processes: tokens equal those of one process, KV is pushed before prefill has finished, and
there are no leaks."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.forward.decoder import Decoder
from baton.sampling_params import SamplingParams
from tests.support.clusters.relays import Answer, Relay, ask, check_drafted, jobs_in_flight, local_relay, slots_in_use
from tests.support.engines.speculating import SPECULATING, ways
from tests.support.eventually import eventually
from tests.support.models.reference import check_equal_tokens
from tests.support.models.texts import passage_ids

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=1234, ignore_eos=True)
NUM_TRIES = 3
"""On a crowded machine a rank may be told late that its KV has come."""


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=ways(
        "off", ci=("auto", "snapkv", "streaming host", "auto @emulated", "snapkv @emulated", "streaming host @emulated")
    ),
)
async def relay(short_smollm2: Path, request: pytest.FixtureRequest) -> AsyncIterator[Relay]:
    way, _, device = request.param.partition(" @")
    async with local_relay(short_smollm2, num_ranks=3, generate=SPECULATING[way], device=device or "cpu") as running:
        yield running
        await check_drafted(running, way)


@pytest.fixture(scope="module")
def decoder(short_smollm2: Path) -> Decoder:
    return load_decoder(short_smollm2, dtype="float32")


@pytest.mark.parametrize("num_tokens", [1, 2, 37, 700])
async def test_greedy_tokens_equal_one_process(
    relay: Relay, decoder: Decoder, short_smollm2: Path, num_tokens: int
) -> None:
    prompt = passage_ids(short_smollm2, num_tokens)
    answer = await ask(relay, prompt, GREEDY)
    assert len(answer.token_ids) == GREEDY.max_tokens
    check_equal_tokens(decoder, prompt, answer.token_ids, GREEDY)


async def test_sampled_tokens_equal_one_process_alone_and_among_others(
    relay: Relay, decoder: Decoder, short_smollm2: Path
) -> None:
    prompts = [passage_ids(short_smollm2, 20 + 7 * index, start=50 * index) for index in range(8)]
    together = await asyncio.gather(*(ask(relay, prompt, SAMPLED) for prompt in prompts))
    alone = await ask(relay, prompts[3], SAMPLED)
    assert alone.token_ids == together[3].token_ids
    for prompt, answer in zip(prompts, together, strict=True):
        check_equal_tokens(decoder, prompt, answer.token_ids, SAMPLED)


async def test_kv_bytes_are_the_formula_and_leave_early(relay: Relay, decoder: Decoder, short_smollm2: Path) -> None:
    prompt = passage_ids(short_smollm2, 600)
    answer, num_tries = await ask(relay, prompt, GREEDY), 1
    while num_tries < NUM_TRIES and not heard_early(answer):
        answer, num_tries = await ask(relay, prompt, GREEDY), num_tries + 1
    ranks = answer.timings.prefill.ranks
    assert (len(ranks), answer.timings.prefill.width.width if answer.timings.prefill.width else 0) == (3, 3)
    token_bytes = decoder.layout.token_bytes
    assert [rank.num_bytes_pushed for rank in ranks] == [len(rank.tokens) * token_bytes for rank in ranks]
    assert [rank.num_bytes_shared for rank in ranks] == [rank.num_bytes_pushed for rank in ranks]
    assert [rank.num_bytes_sent for rank in ranks] == [*(rank.tokens.end * token_bytes for rank in ranks[:-1]), 0]
    assert ranks[-1].tokens.end == 600
    chain_end_ns = answer.tokens[0].unix_ns
    assert ranks[0].push_start_ns < ranks[0].layers[1].end_ns
    assert all(rank.push_start_ns < chain_end_ns for rank in ranks)
    assert heard_early(answer)


def heard_early(answer: Answer) -> bool:
    """The first rank was told before the chain's end that all of its KV had come."""
    ranks = answer.timings.prefill.ranks
    return bool(ranks) and ranks[0].push_end_ns < answer.tokens[0].unix_ns


@pytest.mark.ci
async def test_kv_goes_over_grpc_where_that_is_configured(decoder: Decoder, short_smollm2: Path) -> None:
    prompt = passage_ids(short_smollm2, 200)
    async with local_relay(short_smollm2, num_ranks=2, transfer="stream") as running:
        answer = await ask(running, prompt, GREEDY)
    ranks = answer.timings.prefill.ranks
    assert [rank.num_bytes_shared for rank in ranks] == [0, 0]
    assert sum(rank.num_bytes_pushed for rank in ranks) == 200 * decoder.layout.token_bytes
    check_equal_tokens(decoder, prompt, answer.token_ids, GREEDY)


async def test_a_closed_stream_frees_everything(relay: Relay, short_smollm2: Path) -> None:
    prompt = passage_ids(short_smollm2, 400)
    running = asyncio.create_task(ask(relay, prompt, SamplingParams(max_tokens=2000, ignore_eos=True)))
    await eventually(lambda: slots_in_use(relay), lambda held: held[0] == 1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await eventually(lambda: slots_in_use(relay), lambda held: held == (0, 0))
    await eventually(lambda: jobs_in_flight(relay), lambda jobs: jobs == [0, 0, 0])


async def test_nothing_is_held_when_all_is_quiet(relay: Relay) -> None:
    await eventually(lambda: slots_in_use(relay), lambda held: held == (0, 0))
    await eventually(lambda: jobs_in_flight(relay), lambda jobs: jobs == [0, 0, 0])


@pytest.mark.ci
async def test_one_rank_and_no_rank_give_the_same_text(relay: Relay, short_smollm2: Path) -> None:
    prompt = passage_ids(short_smollm2, 90)
    expected = await ask(relay, prompt, SAMPLED)
    for num_ranks in (0, 1):
        async with local_relay(short_smollm2, num_ranks=num_ranks) as other:
            answer = await ask(other, prompt, SAMPLED)
        assert answer.text == expected.text


async def test_reference_itself_can_fail(decoder: Decoder, short_smollm2: Path) -> None:
    prompt = passage_ids(short_smollm2, 30)
    with torch.inference_mode(), pytest.raises(AssertionError, match="differ"):
        check_equal_tokens(decoder, prompt, [5] * 24, GREEDY)
