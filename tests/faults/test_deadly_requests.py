"""A request that aborts each worker that computes it ends two workers, not the whole pool. Other requests are served.

The test uses real processes and the real supervisor. Workers abort in the step that computes the marked prompt.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.client import AsyncClient
from baton.errors import BatonError
from baton.modeling.checkpoints.weights import load_decoder
from baton.sampling_params import SamplingParams
from deploy.config.worker import WorkerConfig
from deploy.groups.processes import ProcessSpawner
from deploy.groups.surroundings import Heartbeat
from generate_workers.config import EngineConfig
from orchestrator.requests.config import OrchestratorConfig
from tests.support.clusters.processes.doomed_worker import DEADLY
from tests.support.clusters.supervision import SupervisedCluster, supervised
from tests.support.clusters.workers import tiny_worker
from tests.support.engines.generation import prompt
from tests.support.models.letter_models import MAX_TOKENS, write_letter_model
from tests.support.models.reference import check_equal_tokens

pytestmark = pytest.mark.integration

ENGINE = EngineConfig(num_slots=8, max_slot_tokens=MAX_TOKENS)
ENGINES = ("generate-0", "generate-1", "generate-2")
CHAINS = ("prefill-0", "prefill-1", "prefill-2", "generate-0")
PATIENCE_S = 120.0
"""Far above any bound: what takes longer hangs."""
NUM_INNOCENT = 9
REFUSED = "is not retried: two workers ended while they computed it"


@asynccontextmanager
async def doomed(folder: Path, names: Sequence[str]) -> AsyncIterator[SupervisedCluster]:
    """Groups of one worker each; where there are chains, they prefill everything."""
    write_letter_model(folder)

    def workers_of(name: str, _: Path) -> Sequence[WorkerConfig]:
        role, number = name.split("-")
        section = ENGINE if role == "generate" else None
        return [tiny_worker(role, group=int(number), folder=folder, section=section)]

    plan = SupervisedCluster(
        load_decoder(folder, dtype="float32"),
        names=names,
        num_slots=ENGINE.num_slots,
        max_tokens=MAX_TOKENS,
        heartbeat=Heartbeat(interval_s=0.5, dead_after_s=20.0),
        processes=ProcessSpawner(300.0, "tests.support.clusters.processes.doomed_worker"),
        workers_of=workers_of,
    )
    config = OrchestratorConfig(
        prefill_wait_s=60.0,
        generation_wait_s=60.0,
        disaggregation="always" if "prefill-0" in names else "never",
    )
    async with supervised(plan, config=config) as made:
        yield made


def num_aborted(made: SupervisedCluster) -> int:
    return sum("ended with status -6" in line for line in made.reports)


async def ask_innocently(made: SupervisedCluster, seed: int) -> int:
    """Ask, check the tokens, and return the number of attempts."""
    ids, params = prompt(20 + seed, seed), SamplingParams(max_tokens=40, temperature=0.8, seed=seed, ignore_eos=True)
    answer = await asyncio.wait_for(made.ask(made.request(ids, params), None), PATIENCE_S)
    check_equal_tokens(made.decoder, ids, answer.token_ids, params)
    assert len(answer.token_ids) == params.max_tokens
    return answer.end.usage.num_attempts


@pytest.mark.parametrize("names", [pytest.param(ENGINES, id="engines"), pytest.param(CHAINS, id="chains")])
async def test_a_request_that_aborts_its_workers_ends_two_of_them(tmp_path: Path, names: Sequence[str]) -> None:
    params = SamplingParams(max_tokens=9, seed=4)
    async with doomed(tmp_path, names) as made:
        deadly = made.request((*DEADLY, *prompt(20)), params)
        refused, *attempts = await asyncio.gather(
            asyncio.wait_for(made.ask(deadly, None), PATIENCE_S),
            *(ask_innocently(made, seed) for seed in range(NUM_INNOCENT)),
            return_exceptions=True,
        )
        assert isinstance(refused, BatonError) and REFUSED in str(refused), (refused, made.reports)
        assert not refused.retryable
        assert num_aborted(made) == 2, made.reports
        for num in attempts:
            assert isinstance(num, int) and num <= 3, attempts  # each crash took one: the last of the default serves it

        await made.cluster.until_ready(PATIENCE_S)
        with pytest.raises(BatonError, match=REFUSED):
            await made.ask(deadly)
        assert await ask_innocently(made, 0) == 1
        assert num_aborted(made) == 2, made.reports


async def test_a_client_does_not_resume_a_request_that_aborts_its_workers(tmp_path: Path) -> None:
    async with doomed(tmp_path, ENGINES) as made, AsyncClient(made.target) as client:
        stream = client.generate(token_ids=(*DEADLY, *prompt(20)), max_tokens=9, seed=4)
        with pytest.raises(BatonError, match=REFUSED):
            assert [event async for event in stream] == []
        assert num_aborted(made) == 2, made.reports
