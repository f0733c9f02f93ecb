"""Workers that die or hang: typed errors in bounded time, streams that go on with the same text, a new epoch."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from baton.errors import ChainError, UnavailableError
from baton.sampling_params import SamplingParams
from tests.support.eventually import eventually
from tests.support.relays import Relay, ask, jobs_in_flight, local_relay, slots_in_use
from tests.support.texts import passage_ids

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, temperature=0.8, seed=5, ignore_eos=True)


@pytest_asyncio.fixture
async def relay(smollm2: Path) -> AsyncIterator[Relay]:
    async with local_relay(smollm2, num_ranks=2, watchdog_floor_s=2.0, heartbeat_s=0.5) as running:
        yield running


async def _wound(relay: Relay, rank: int, with_signal: signal.Signals) -> None:
    """Waits until the rank works on a job, then hits it."""
    await eventually(lambda: jobs_in_flight(relay), lambda jobs: jobs[rank] > 0, within_s=20)
    os.kill(relay.cluster.ranks[rank].handle.pid, with_signal)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGSTOP])
async def test_request_survives_a_lost_rank(
    relay: Relay, smollm2: Path, rank: int, with_signal: signal.Signals
) -> None:
    prompt = passage_ids(smollm2, 1500)
    expected = await ask(relay, prompt, PARAMS)
    epoch = relay.cluster.epoch
    running = asyncio.create_task(ask(relay, prompt, PARAMS))
    await _wound(relay, rank, with_signal)
    answer = await asyncio.wait_for(running, 60)
    assert answer.token_ids == expected.token_ids
    assert answer.num_attempts >= 2
    await relay.cluster.until_ready(60)
    assert relay.cluster.epoch > epoch
    await eventually(lambda: slots_in_use(relay), lambda held: held == (0, 0), within_s=2)


async def test_without_retries_the_error_is_typed_and_prompt(smollm2: Path) -> None:
    async with local_relay(smollm2, num_ranks=2, max_attempts=1) as relay:
        running = asyncio.create_task(ask(relay, passage_ids(smollm2, 1500), PARAMS))
        await _wound(relay, 1, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises((ChainError, UnavailableError)):
            await running
        assert time.monotonic() - start < 5


async def test_a_stream_goes_on_when_its_generation_engine_dies(relay: Relay, smollm2: Path) -> None:
    prompt = passage_ids(smollm2, 50)
    expected = await ask(relay, prompt, LONG)
    running = asyncio.create_task(ask(relay, prompt, LONG))
    await eventually(lambda: slots_in_use(relay), lambda held: held[0] == 1, within_s=10)
    await eventually(lambda: jobs_in_flight(relay), lambda jobs: jobs == [0, 0], within_s=10)
    os.kill(relay.cluster.generation.handle.pid, signal.SIGKILL)
    answer = await asyncio.wait_for(running, 90)
    assert answer.num_attempts == 2
    assert [event.index for event in answer.tokens] == list(range(LONG.max_tokens))
    assert answer.token_ids == expected.token_ids
    assert answer.text == expected.text


async def test_no_process_outlives_its_launcher(smollm2: Path) -> None:
    async with local_relay(smollm2, num_ranks=1) as relay:
        pids = [worker.handle.pid for worker in (relay.cluster.generation, *relay.cluster.ranks)]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
