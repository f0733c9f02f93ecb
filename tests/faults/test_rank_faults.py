"""A prefill rank is killed, stopped or hangs at any step of its work, under load. Every stream ends in time with exact
tokens.

The tests use real processes and the real supervisor. The rank triggers the fault itself at the selected step, so that
its timing is exact.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.errors import BatonError
from baton.modeling.checkpoints.weights import load_decoder
from baton.sampling_params import SamplingParams
from deploy.config.worker import WorkerConfig
from deploy.groups.processes import ProcessSpawner
from deploy.groups.surroundings import Heartbeat
from generate_workers.config import EngineConfig
from orchestrator.requests.config import OrchestratorConfig
from prefill_workers.config import PrefillConfig
from tests.support.clusters.processes.doomed_worker import Doom, End, Moment, is_pending
from tests.support.clusters.supervision import SupervisedCluster, supervised
from tests.support.clusters.workers import tiny_worker
from tests.support.engines.generation import prompt
from tests.support.eventually import eventually
from tests.support.models.letter_models import MAX_TOKENS, NUM_LAYERS, write_letter_model
from tests.support.models.reference import check_equal_tokens

pytestmark = pytest.mark.integration

NUM_REQUESTS = 10
"""At the same time, in each round."""
PATIENCE_S = 60.0
"""Far above any bound: a request that takes longer hangs."""
SETTLE_S = 30.0
"""For what a lost attempt held: its lease's ttl."""
MIDDLE = NUM_LAYERS // 2
GROUP_SIZES = (2, 1)
"""Ranks of each prefill group; one generation engine is behind both."""
CONFIG = OrchestratorConfig(
    avoid_s=0.3, prefill_wait_s=60.0, generation_wait_s=60.0, max_attempts=8, lease_ttl_s=15.0, disaggregation="always"
)
"""A request waits for a group that is being replaced: none is prefilled by the generation engine."""
Life = tuple[int, tuple[str, ...]]


@dataclass(frozen=True)
class Blow:
    """A victim, and what befalls it."""

    group: int
    rank: int
    doom: Doom

    @property
    def victim(self) -> str:
        """The worker's name."""
        return f"prefill-{self.group}.{self.rank}"


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


@asynccontextmanager
async def doomed(folder: Path) -> AsyncIterator[SupervisedCluster]:
    """Processes of the letter model that is written to the folder, whose ranks end at steps that a test picks."""
    write_letter_model(folder)
    engine = EngineConfig(num_slots=8, max_slot_tokens=MAX_TOKENS)

    def workers_of(name: str, _: Path) -> Sequence[WorkerConfig]:
        role, number = name.split("-")
        if role == "generate":
            return [tiny_worker(role, folder=folder, section=engine)]
        section, size = PrefillConfig(watchdog_floor_s=8.0), GROUP_SIZES[int(number)]
        return [tiny_worker(role, rank, int(number), folder, section) for rank in range(size)]

    plan = SupervisedCluster(
        load_decoder(folder, dtype="float32"),
        names=(*(f"prefill-{group}" for group in range(len(GROUP_SIZES))), "generate-0"),
        num_slots=engine.num_slots,
        max_tokens=MAX_TOKENS,
        heartbeat=Heartbeat(interval_s=0.5, dead_after_s=8.0),
        processes=ProcessSpawner(300.0, "tests.support.clusters.processes.doomed_worker"),
        workers_of=workers_of,
    )
    async with supervised(plan, config=CONFIG) as made:
        yield made


def incarnation(made: SupervisedCluster, group: int) -> Life:
    """What is another after a prefill group was repaired."""
    found = made.cluster.prefill[group]
    assert found.links is not None
    return found.links.epoch, found.endpoints


async def until_repaired(made: SupervisedCluster, group: int, former: Life) -> None:
    """The group has another incarnation than that, and serves."""

    async def present() -> Life:
        return incarnation(made, group)

    await eventually(present, lambda now: now[0] != former[0] and now[1] != former[1], PATIENCE_S)
    await made.cluster.until_ready(PATIENCE_S)


def random_blow(rng: random.Random) -> Blow:
    """Any rank, at any step of any of its jobs."""
    group = rng.randrange(len(GROUP_SIZES))
    end = rng.choices([End.KILL, End.STOP, End.HANG], [6, 2, 2])[0]
    return Blow(group, rng.randrange(GROUP_SIZES[group]), Doom(end, num_spared=rng.randrange(60)))


async def one_request(made: SupervisedCluster, rng: random.Random) -> str:
    """Asks; what became of it."""
    ids = prompt(rng.choice([rng.randint(1, 30), rng.randint(100, 400)]), rng.randint(0, 99))
    params = SamplingParams(max_tokens=rng.randint(1, 20), temperature=0.8, seed=rng.getrandbits(64), ignore_eos=True)
    try:
        answer = await asyncio.wait_for(made.ask(made.request(ids, params), None), PATIENCE_S)
    except BatonError as error:
        if not error.retryable:
            raise
        return "failed"
    assert answer.indices == list(range(params.max_tokens))
    check_equal_tokens(made.decoder, ids, answer.token_ids, params)
    return "retried" if answer.end.usage.num_attempts > 1 else "answered"


async def requests(made: SupervisedCluster, rng: random.Random) -> Counter[str]:
    """Some at the same time."""
    asked = (one_request(made, random.Random(rng.random())) for _ in range(NUM_REQUESTS))
    return Counter(await asyncio.gather(*asked))


async def strike(made: SupervisedCluster, folder: Path, blows: Sequence[Blow], rng: random.Random) -> Counter[str]:
    """Requests come until the blows have fallen; then all is as it was, but for the victims' groups. What became of
    the requests."""
    incarnations = [incarnation(made, group) for group in range(len(GROUP_SIZES))]
    for blow in blows:
        blow.doom.lay(folder, blow.victim)
    outcomes: Counter[str] = Counter()
    async with asyncio.timeout(PATIENCE_S):
        while any(is_pending(folder, blow.victim) for blow in blows):
            outcomes += await requests(made, rng)
    assert not outcomes["failed"], f"{blows}: {outcomes}"
    struck = {blow.group for blow in blows}
    for group in struck:
        await until_repaired(made, group, incarnations[group])
    await made.until_empty(SETTLE_S)
    for group, former in enumerate(incarnations):
        assert group in struck or incarnation(made, group) == former, f"{blows}: {made.reports[-6:]}"
    return outcomes


@pytest.mark.ci
async def test_requests_survive_a_rank_that_ends_at_any_step(tmp_path: Path) -> None:
    rng = random.Random(1)
    async with doomed(tmp_path) as made:
        for blows in ROUNDS:
            outcomes = await strike(made, tmp_path, blows, rng)
            assert outcomes["retried"], f"{blows}: {outcomes}"
        assert set(await requests(made, rng)) == {"answered"}


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_requests_survive_ranks_that_end_at_twenty_random_moments(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    async with doomed(tmp_path) as made:
        for _ in range(20):
            await strike(made, tmp_path, [random_blow(rng)], rng)
        assert set(await requests(made, rng)) == {"answered"}
