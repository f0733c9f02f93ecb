"""A prefill rank is killed, stopped or hangs at any step of its work, under load: every stream ends exactly, in time.

Real processes under the real supervisor. The rank strikes itself at the picked step, so the moment is exact.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.errors import BatonError
from baton.sampling_params import SamplingParams
from tests.support.clusters.doomed_clusters import GROUP_SIZES, DoomedCluster, doomed_cluster
from tests.support.clusters.doomed_worker import Doom, End, Moment
from tests.support.engines.generation import prompt
from tests.support.models.letter_models import NUM_LAYERS, write_letter_model
from tests.support.models.reference import check_equal_tokens

pytestmark = pytest.mark.integration

NUM_REQUESTS = 10
"""At the same time, in each round."""
PATIENCE_S = 60.0
"""Far above any bound: a request that takes longer hangs."""
SETTLE_S = 30.0
"""For what a lost attempt held: its lease's ttl."""
MIDDLE = NUM_LAYERS // 2


@dataclass(frozen=True)
class Blow:
    """A victim, and what befalls it."""

    group: int
    rank: int
    doom: Doom


LAYER_BEGINS = Blow(0, 0, Doom(End.KILL, Moment.PROJECT, MIDDLE))
LONE_RANK_COMPLETES = Blow(1, 0, Doom(End.KILL, Moment.COMPLETE, MIDDLE))
ROUNDS = (
    (LAYER_BEGINS, LONE_RANK_COMPLETES),  # no chain is left for a while
    (Blow(0, 1, Doom(End.KILL, Moment.ATTEND, MIDDLE)),),
    (Blow(0, 0, Doom(End.STOP, Moment.PUSH, MIDDLE)),),
    (Blow(0, 1, Doom(End.KILL, Moment.FINISH)),),
    (Blow(0, 1, Doom(End.HANG, Moment.ATTEND, MIDDLE)),),  # no rank waits for the last
    (Blow(1, 0, Doom(End.HANG, Moment.COMPLETE, MIDDLE)),),  # nor for one that is alone
)
"""Together they strike before, during and after each part of a layer, and right before the commit."""


def random_blow(rng: random.Random) -> Blow:
    """Any rank, at any step of any of its jobs."""
    group = rng.randrange(len(GROUP_SIZES))
    end = rng.choices([End.KILL, End.STOP, End.HANG], [6, 2, 2])[0]
    return Blow(group, rng.randrange(GROUP_SIZES[group]), Doom(end, num_spared=rng.randrange(60)))


async def one_request(made: DoomedCluster, rng: random.Random) -> str:
    """Asks; what became of it."""
    ids = prompt(rng.choice([rng.randint(1, 30), rng.randint(100, 400)]), rng.randint(0, 99))
    params = SamplingParams(max_tokens=rng.randint(1, 20), temperature=0.8, seed=rng.getrandbits(64), ignore_eos=True)
    try:
        answer = await asyncio.wait_for(made.ask(ids, params), PATIENCE_S)
    except BatonError as error:
        if not error.retryable:
            raise
        return "failed"
    assert answer.indices == list(range(params.max_tokens))
    check_equal_tokens(made.decoder, ids, answer.token_ids, params)
    assert answer.finished is not None
    return "retried" if answer.finished.usage.num_attempts > 1 else "answered"


async def requests(made: DoomedCluster, rng: random.Random) -> Counter[str]:
    """Some at the same time."""
    asked = (one_request(made, random.Random(rng.random())) for _ in range(NUM_REQUESTS))
    return Counter(await asyncio.gather(*asked))


async def strike(made: DoomedCluster, blows: Sequence[Blow], rng: random.Random) -> Counter[str]:
    """Requests come until the blows have fallen; then all is as it was, but for the victims' groups. What became of
    the requests."""
    lives = [made.life(group) for group in range(len(GROUP_SIZES))]
    for blow in blows:
        made.doom(blow.group, blow.rank, blow.doom)
    outcomes: Counter[str] = Counter()
    async with asyncio.timeout(PATIENCE_S):
        while any(made.is_doomed(blow.group, blow.rank) for blow in blows):
            outcomes += await requests(made, rng)
    assert not outcomes["failed"], f"{blows}: {outcomes}"
    struck = {blow.group for blow in blows}
    for group in struck:
        await made.until_repaired(group, lives[group], PATIENCE_S)
    await made.until_empty(SETTLE_S)
    for group, life in enumerate(lives):
        assert group in struck or made.life(group) == life, f"{blows}: {made.reports[-6:]}"
    return outcomes


@pytest.mark.ci
async def test_requests_survive_a_rank_that_ends_at_any_step(tmp_path: Path) -> None:
    rng = random.Random(1)
    async with doomed_cluster(write_letter_model(tmp_path)) as made:
        for blows in ROUNDS:
            outcomes = await strike(made, blows, rng)
            assert outcomes["retried"], f"{blows}: {outcomes}"
        assert set(await requests(made, rng)) == {"answered"}


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_requests_survive_ranks_that_end_at_twenty_random_moments(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    async with doomed_cluster(write_letter_model(tmp_path)) as made:
        for _ in range(20):
            await strike(made, [random_blow(rng)], rng)
        assert set(await requests(made, rng)) == {"answered"}
