"""Cached prefixes with real processes. A second prompt computes only the missing tokens, tokens are exact, and the
folder is removed with its last rank."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.forward.decoder import Decoder
from baton.modeling.prefix_store.folder import node_folder
from baton.sampling_params import SamplingParams
from tests.support.clusters.relays import Relay, ask, check_drafted, local_relay, slots_in_use
from tests.support.engines.prefixes import blocks_in
from tests.support.engines.speculating import SPECULATING, ways
from tests.support.eventually import eventually
from tests.support.models.reference import check_equal_tokens
from tests.support.models.texts import passage_ids

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
FOLDER = node_folder(f"local-{os.getpid()}")
BLOCK = 128


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=ways("off", ci=("streaming", "auto host", "streaming @emulated"))
)
async def relay(short_smollm2: Path, request: pytest.FixtureRequest) -> AsyncIterator[Relay]:
    way, _, device = request.param.partition(" @")
    generate, device = SPECULATING[way], device or "cpu"
    async with local_relay(short_smollm2, num_ranks=2, prefix_share=0.1, generate=generate, device=device) as running:
        assert FOLDER.is_dir()
        yield running
        await check_drafted(running, way)


@pytest.fixture(scope="module")
def decoder(short_smollm2: Path) -> Decoder:
    return load_decoder(short_smollm2, dtype="float32")


async def test_a_prompt_that_begins_alike_computes_what_is_missing(
    relay: Relay, decoder: Decoder, short_smollm2: Path
) -> None:
    shared = passage_ids(short_smollm2, 300)
    cold = await ask(relay, shared, GREEDY)
    assert cold.finished.usage.num_cached_tokens == 0
    for num_shared in (300, 150):
        prompt = (*shared[:num_shared], *passage_ids(short_smollm2, 50, start=2000 + num_shared))
        answer = await ask(relay, prompt, GREEDY)
        cached = num_shared // BLOCK * BLOCK
        assert (answer.finished.usage.num_cached_tokens, answer.num_attempts) == (cached, 1)
        ranks = answer.timings.prefill.ranks
        assert (ranks[0].tokens.start, ranks[-1].tokens.end) == (cached, len(prompt))
        check_equal_tokens(decoder, prompt, answer.token_ids, GREEDY)


async def test_the_next_turn_of_a_chat_reuses_prompt_and_answer(
    relay: Relay, decoder: Decoder, short_smollm2: Path
) -> None:
    asked = passage_ids(short_smollm2, 100, start=1300)  # less than a block: the answer's first tokens fill it
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    first = await ask(relay, asked, params)
    await eventually(lambda: slots_in_use(relay), lambda used: used == (0, 0))  # the answer is stored
    prompt = (*asked, *first.token_ids, *passage_ids(short_smollm2, 30, start=1600))
    second = await ask(relay, prompt, GREEDY)
    cached = (100 + 39) // BLOCK * BLOCK
    assert (second.finished.usage.num_cached_tokens, second.num_attempts) == (cached, 1)
    pushed = sum(rank.num_bytes_pushed for rank in second.timings.prefill.ranks)
    assert pushed == (len(prompt) - cached) * decoder.layout.token_bytes
    check_equal_tokens(decoder, prompt, second.token_ids, GREEDY)
    await eventually(lambda: slots_in_use(relay), lambda used: used == (0, 0))


async def test_a_wrong_hint_is_harmless(relay: Relay, decoder: Decoder, short_smollm2: Path) -> None:
    prompt = passage_ids(short_smollm2, 200, start=700)
    await ask(relay, prompt, GREEDY)
    for name in blocks_in(FOLDER):
        (FOLDER / name).unlink()
    answer = await ask(relay, prompt, GREEDY)
    assert (answer.finished.usage.num_cached_tokens, answer.num_attempts) == (0, 1)
    check_equal_tokens(decoder, prompt, answer.token_ids, GREEDY)


@pytest.mark.ci
async def test_a_prefix_outlives_its_ranks(short_smollm2: Path) -> None:
    prompt = passage_ids(short_smollm2, 200, start=900)
    async with local_relay(short_smollm2, num_ranks=1, prefix_share=0.1) as relay:
        await ask(relay, prompt, GREEDY)
        (rank,) = relay.cluster.ranks
        rank.handle.kill()
        await rank.handle.wait()
        relay.cluster.suspect()
        await relay.cluster.until_ready(60)
        assert (await ask(relay, prompt, GREEDY)).finished.usage.num_cached_tokens == BLOCK


@pytest.mark.ci
async def test_a_killed_launcher_takes_the_folder_along(short_smollm2: Path) -> None:
    """Its ranks see their input end; the last of them removes the folder. So they do at any other end."""
    program = f"""
import asyncio, os, signal
from pathlib import Path
from tests.support.clusters.relays import local_relay

async def main() -> None:
    async with local_relay(Path({str(short_smollm2)!r}), num_ranks=2, prefix_share=0.1):
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
    launcher = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert launcher.stdout is not None
    assert await asyncio.wait_for(launcher.stdout.readline(), 60) == b"ready\n"
    folder = node_folder(f"local-{launcher.pid}")
    assert folder.is_dir()
    launcher.kill()
    await launcher.wait()
    await eventually(lambda: asyncio.to_thread(folder.exists), lambda there: not there)
