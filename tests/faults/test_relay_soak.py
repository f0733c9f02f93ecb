"""Minutes of random cancels, kills and stops over one relay: every stream ends once, and nothing is held afterwards."""

import asyncio
import contextlib
import os
import random
import signal
from functools import partial
from pathlib import Path

import pytest

from baton.errors import BatonError
from baton.sampling_params import SamplingParams
from tests.support.eventually import eventually
from tests.support.relays import Answer, Relay, ask, jobs_in_flight, local_relay, slots_in_use
from tests.support.texts import passage_ids

pytestmark = pytest.mark.soak

NUM_REQUESTS = 60
NUM_WOUNDS = 6


async def _one(relay: Relay, folder: Path, rng: random.Random) -> Answer | None:
    """A request of random length, cancelled at a random moment one time in three; None unless it was answered."""
    prompt = passage_ids(folder, rng.randint(1, 1200), start=rng.randint(0, 5000))
    params = SamplingParams(max_tokens=rng.randint(1, 40), temperature=1.0, seed=rng.getrandbits(64), ignore_eos=True)
    patience_s = rng.uniform(0.1, 3.0) if rng.random() < 1 / 3 else 90.0
    with contextlib.suppress(TimeoutError, BatonError):
        answer = await asyncio.wait_for(ask(relay, prompt, params), patience_s)
        assert [event.index for event in answer.tokens] == list(range(params.max_tokens))
        return answer
    return None


async def _wound(relay: Relay, rng: random.Random, running: asyncio.Event) -> None:
    """Kills or stops a random rank whenever one works, and waits until all is well again."""

    async def epoch() -> int:
        return relay.cluster.epoch

    for _ in range(NUM_WOUNDS):
        victim, before = rng.randrange(2), relay.cluster.epoch
        await eventually(lambda: jobs_in_flight(relay), partial(_works, victim), within_s=120)
        os.kill(relay.cluster.ranks[victim].handle.pid, rng.choice([signal.SIGKILL, signal.SIGSTOP]))
        await eventually(epoch, before.__lt__, within_s=60)
        await relay.cluster.until_ready(60)
    running.clear()


def _works(rank: int, jobs: list[int]) -> bool:
    return jobs[rank] > 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_nothing_is_lost_or_held(smollm2: Path, seed: int) -> None:
    rng = random.Random(seed)
    async with local_relay(smollm2, num_ranks=2, watchdog_floor_s=2.0, max_attempts=8) as relay:
        running = asyncio.Event()
        running.set()
        wounding = asyncio.create_task(_wound(relay, rng, running))
        answers: list[Answer | None] = []
        while running.is_set() or len(answers) < NUM_REQUESTS:
            answers += await asyncio.gather(*(_one(relay, smollm2, rng) for _ in range(4)))
            assert not wounding.done() or wounding.exception() is None
        await wounding
        assert sum(answer is not None for answer in answers) >= len(answers) // 2
        await eventually(lambda: slots_in_use(relay), lambda held: held == (0, 0), within_s=3)
        await eventually(lambda: jobs_in_flight(relay), lambda jobs: jobs == [0, 0], within_s=3)
