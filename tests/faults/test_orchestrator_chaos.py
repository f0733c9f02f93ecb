"""Seeded storms over one orchestrator: clients leave, groups and ranks die and are replaced; streams stay exact."""

import asyncio
import random

import pytest

from baton.sampling_params import SamplingParams
from orchestrator.config import OrchestratorConfig
from tests.support.generation import prompt
from tests.support.orchestrators import Relay, relay
from tests.support.reference import check_equal_tokens

NUM_REQUESTS = 120
NUM_WOUNDS = 4
CONFIG = OrchestratorConfig(avoid_s=0.5, prefill_wait_s=1.0, generation_wait_s=20, max_attempts=8)


async def one_request(made: Relay, rng: random.Random) -> int:
    """Asks, and leaves one time in three; returns its attempts, 0 if it was not answered."""
    ids = prompt(rng.randint(1, 150), rng.randint(0, 99))
    params = SamplingParams(max_tokens=rng.randint(1, 60), temperature=0.8, seed=rng.getrandbits(64), ignore_eos=True)
    patience_s = rng.uniform(0, 1.0) if rng.random() < 1 / 3 else 60.0
    try:
        answer = await asyncio.wait_for(made.ask(made.request(ids, params)), patience_s)
    except TimeoutError:
        return 0
    assert answer.indices == list(range(params.max_tokens))
    check_equal_tokens(made.decoder, ids, answer.token_ids, params)
    assert answer.finished is not None
    return answer.finished.usage.num_attempts


async def wound_and_heal(made: Relay, rng: random.Random) -> None:
    """What a supervisor does about a worker that has died, after its clients have seen it."""
    if rng.random() < 0.5:
        index = rng.randrange(len(made.groups))
        made.group_gates.pop(index)
        await made.groups.pop(index).stop()
        await made.add_group()
    else:
        made.rank_gates.pop()
        await made.ranks.pop().stop()
        made.members.update(made.view(prefill_ready=False))
        await made.add_rank()
        await made.start_epoch()
    made.members.update(made.view())


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_storm_leaves_exact_streams_and_nothing_held(seed: int) -> None:
    rng = random.Random(seed)
    async with relay(num_groups=2, num_slots=6, config=CONFIG) as made:
        running = [asyncio.create_task(one_request(made, random.Random(rng.random()))) for _ in range(NUM_REQUESTS)]
        for _ in range(NUM_WOUNDS):
            await asyncio.wait(running, timeout=rng.uniform(0.1, 0.6))
            await wound_and_heal(made, rng)
        attempts = await asyncio.gather(*running)
        assert sum(each > 0 for each in attempts) >= NUM_REQUESTS / 2
        assert max(attempts) > 1, "the storm has hit nobody"
        await made.until_empty()
