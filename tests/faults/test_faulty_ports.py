"""Calls slow, refused, lost, dropped or heard twice, workers killed and stopped: tokens stay exact, nothing is held."""

import asyncio
import random
from collections import Counter

import pytest

from baton.errors import BatonError, LeaseError, UnavailableError
from baton.sampling_params import SamplingParams
from tests.support.fault_plans import Fault, PickedPlan, SeededPlan
from tests.support.generation import prompt, reference_ids
from tests.support.reference import check_equal_tokens
from tests.support.storms import TTL_S, Storm, stormy

PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=3, presence_penalty=0.5, ignore_eos=True)
SETTLE_S = 2 * TTL_S + 5
"""A slot whose release was lost is freed by its lease's end; a worker that was frozen is replaced."""
NUM_REQUESTS = 40
NUM_WOUNDS = 3
RATE = 0.05

CASES: dict[str, tuple[Fault, ...]] = {
    "Reserve": tuple(Fault),
    "Push": (Fault.SLOW, Fault.REFUSE, Fault.LOSE, Fault.DROP),
    "Commit": tuple(Fault),
    "Run": (Fault.SLOW, Fault.REFUSE, Fault.LOSE, Fault.DROP),
    "Stream": (Fault.SLOW, Fault.REFUSE, Fault.LOSE, Fault.DROP),
    "Abort": tuple(Fault),
    "Cancel": tuple(Fault),
    "Renew": tuple(Fault),
    "StartEpoch": (Fault.SLOW, Fault.REFUSE, Fault.LOSE, Fault.DROP),
    "link": (Fault.SLOW, Fault.REFUSE, Fault.DROP),
    "outlet": (Fault.SLOW, Fault.REFUSE, Fault.TWICE),
}
OCCASIONS: dict[str, dict[str, Fault]] = {
    "Abort": {"Run": Fault.REFUSE},
    "Cancel": {"Stream": Fault.LOSE},
    "Renew": {"Run": Fault.DROP},
    "StartEpoch": {"link": Fault.REFUSE},
}
"""What has to go wrong for a call to be made at all."""


@pytest.mark.parametrize("name", CASES)
async def test_one_fault_costs_an_attempt_at_most(name: str) -> None:
    for fault in CASES[name]:
        plan = PickedPlan({name: fault, **OCCASIONS.get(name, {})}, amount=0.4)
        async with stormy(plan, num_groups=1) as made:
            plan.is_on = True
            answer = await asyncio.wait_for(made.ask(prompt(40), PARAMS), 20)
            assert answer.token_ids == reference_ids(made.decoder, prompt(40), PARAMS), fault
            assert answer.indices == list(range(PARAMS.max_tokens))
            await made.until_empty(SETTLE_S)
            assert plan.struck[name, fault] == 1
            assert answer.finished is not None
            num_harmless = plan.struck[name, Fault.SLOW] + plan.struck[name, Fault.TWICE]
            assert answer.finished.usage.num_attempts <= 1 + plan.struck.total() - num_harmless


async def one_request(made: Storm, rng: random.Random) -> str:
    """Asks, and leaves one time in five; what became of it."""
    ids = prompt(rng.randint(1, 150), rng.randint(0, 99))
    params = SamplingParams(max_tokens=rng.randint(1, 40), temperature=0.8, seed=rng.getrandbits(64), ignore_eos=True)
    patience_s = rng.uniform(0, 2.0) if rng.random() < 0.2 else 90.0
    try:
        answer = await asyncio.wait_for(made.ask(ids, params), patience_s)
    except TimeoutError:
        assert patience_s < 90, "a request hung"
        return "left"
    except BatonError as error:
        if not (error.retryable or isinstance(error, LeaseError | UnavailableError)):
            raise
        return "failed"
    assert answer.indices == list(range(params.max_tokens))
    check_equal_tokens(made.decoder, ids, answer.token_ids, params)
    assert answer.finished is not None
    return "retried" if answer.finished.usage.num_attempts > 1 else "answered"


def wound(made: Storm, rng: random.Random) -> None:
    """Kills or stops a worker."""
    victim = rng.choice(made.spawner.living)
    rng.choice([victim.kill, victim.freeze])()


SEEDS = [1, 2, 3, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 34))]


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_storm_leaves_exact_streams_and_nothing_held(seed: int) -> None:
    rng, plan = random.Random(seed), SeededPlan(seed, RATE)
    async with stormy(plan) as made:
        plan.is_on = True
        running = [asyncio.create_task(one_request(made, random.Random(rng.random()))) for _ in range(NUM_REQUESTS)]
        for _ in range(NUM_WOUNDS):
            await asyncio.wait(running, timeout=rng.uniform(0.2, 1.0))
            wound(made, rng)
        outcomes = Counter(await asyncio.gather(*running))
        plan.is_on = False
        assert outcomes["failed"] <= NUM_REQUESTS / 4
        assert outcomes["retried"] >= 3, "the storm has hit nobody"
        assert len({fault for _, fault in plan.struck}) == len(Fault)
        await made.until_empty(SETTLE_S)
