"""A generation engine's thread hangs or is slow inside a step. Only an engine that hangs is replaced.

The tests use real processes and the real supervisor. The engine triggers the fault itself at the selected step, so that
its timing is exact.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.modeling.checkpoints.weights import load_decoder
from baton.sampling_params import SamplingParams
from deploy.config.worker import WorkerConfig
from deploy.groups.processes import ProcessSpawner
from deploy.groups.surroundings import Heartbeat
from generate_workers.config import EngineConfig
from orchestrator.requests.config import OrchestratorConfig
from tests.support.clusters.processes.doomed_worker import Doom, End, Moment, is_pending
from tests.support.clusters.supervision import SupervisedCluster, supervised
from tests.support.clusters.workers import tiny_worker
from tests.support.engines.generation import prompt
from tests.support.eventually import eventually
from tests.support.models.letter_models import MAX_TOKENS, write_letter_model
from tests.support.models.reference import check_equal_tokens

pytestmark = pytest.mark.integration

NAMES = ("generate-0", "generate-1")
ENGINE = EngineConfig(num_slots=8, max_slot_tokens=MAX_TOKENS, watchdog_floor_s=4.0)
"""A thread that works at a fifth of a core, or waits for a compiler, does so for three times that floor."""
CONFIG = OrchestratorConfig(generation_wait_s=60.0, disaggregation="never")
PATIENCE_S = 120.0
"""Far above any bound: what takes longer hangs."""
NUM_REQUESTS = 6
HANG = Doom(End.HANG, Moment.FORWARD, num_spared=8)
OTHERS = (
    Doom(End.SLOW, Moment.FORWARD, num_spared=8),
    Doom(End.COMPILE, Moment.FORWARD),
    Doom(End.HANG, Moment.SAMPLE),
    Doom(End.HANG, Moment.COPY),
)


@asynccontextmanager
async def doomed(folder: Path) -> AsyncIterator[SupervisedCluster]:
    """Two engines that prefill by themselves, as processes."""
    write_letter_model(folder)

    def workers_of(name: str, _: Path) -> Sequence[WorkerConfig]:
        return [tiny_worker("generate", group=NAMES.index(name), folder=folder, section=ENGINE)]

    plan = SupervisedCluster(
        load_decoder(folder, dtype="float32"),
        names=NAMES,
        num_slots=ENGINE.num_slots,
        max_tokens=MAX_TOKENS,
        heartbeat=Heartbeat(interval_s=0.5, dead_after_s=20.0),
        processes=ProcessSpawner(300.0, "tests.support.clusters.processes.doomed_worker"),
        workers_of=workers_of,
    )
    async with supervised(plan, config=CONFIG) as made:
        yield made


async def ask(made: SupervisedCluster, seed: int) -> int:
    """Ask for two choices, or, where tokens may have come before a blow, for one; check the tokens, and return the
    number of attempts."""
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=seed, ignore_eos=True, n=1 + seed % 2)
    ids = prompt(30, seed)
    answer = await asyncio.wait_for(made.ask(made.request(ids, params), None), PATIENCE_S)
    for choice, token_ids in {0: answer.token_ids, **answer.others}.items():
        assert len(token_ids) == params.max_tokens
        check_equal_tokens(made.decoder, ids, token_ids, params.of_choice(choice))
    return answer.end.usage.num_attempts


async def strike(made: SupervisedCluster, folder: Path, doom: Doom) -> int:
    """Ask until the first engine was struck. Return the most attempts of a request."""
    doom.lay(folder, NAMES[0])
    num_attempts = 1
    async with asyncio.timeout(PATIENCE_S):
        while is_pending(folder, NAMES[0]):
            num_attempts = max(num_attempts, *await asyncio.gather(*(ask(made, seed) for seed in range(NUM_REQUESTS))))
    return num_attempts


async def until_replaced(made: SupervisedCluster, before: dict[str, tuple[str, ...]]) -> None:
    """Wait until the first engine has another incarnation, and serves."""

    async def endpoints() -> dict[str, tuple[str, ...]]:
        return made.endpoints()

    await eventually(endpoints, lambda now: now[NAMES[0]] != before[NAMES[0]], PATIENCE_S)
    await made.cluster.until_ready(PATIENCE_S)


@pytest.mark.parametrize(
    "dooms",
    [
        pytest.param([HANG], id="hangs in a forward"),
        pytest.param(OTHERS, marks=[pytest.mark.ci, pytest.mark.timeout(600)], id="others"),
    ],
)
async def test_engine_that_hangs_in_a_step_is_replaced_and_a_slow_one_is_not(
    tmp_path: Path, dooms: Sequence[Doom]
) -> None:
    async with doomed(tmp_path) as made:
        for doom in dooms:
            before = made.endpoints()
            num_attempts = await strike(made, tmp_path, doom)
            if doom.end is End.HANG:
                assert num_attempts > 1, made.reports
                await until_replaced(made, before)
                assert made.endpoints()[NAMES[1]] == before[NAMES[1]]
            else:
                assert (num_attempts, made.endpoints()) == (1, before), made.reports
            await made.until_empty(PATIENCE_S)
