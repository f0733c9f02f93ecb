"""Traffic at a live cluster of paced workers: what comes of it beside the simulator's word, and groups that start and
leave meanwhile."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from baton.v1 import orchestrator_pb2 as pb
from baton.v1.orchestrator_pb2_grpc import OrchestratorStub
from deploy.cli import main
from deploy.config.environment import SECRET_VARIABLE
from deploy.traffic.generators import Lengths, bimodal, steady
from modeling.checkpoints.weights import load_decoder
from tests.support.clusters.orchestrators import held_by
from tests.support.eventually import eventually
from tests.support.models.reference import check_equal_tokens
from tests.support.paced.cluster import PacedCluster, PacedPlan, paced_cluster
from tests.support.paced.comparing import both_ways
from tests.support.paced.hardware import PacedHardware, write_paced_model
from tests.support.paced.load import Played, play

pytestmark = [pytest.mark.ci, pytest.mark.timeout(300)]

COLD_START_S = 3.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "paced"
    made.mkdir()
    write_paced_model(made)
    return made


async def test_a_trace_goes_as_simulated(folder: Path) -> None:
    trace = bimodal(4.0, 15.0, 7, (Lengths(1000, 16), Lengths(100, 32)))
    async with paced_cluster(folder, PacedHardware.load(folder), PacedPlan((2, 2))) as cluster:
        found = await both_ways(cluster, trace, seed=7)
        await check_served(cluster, found.played)
    assert 0.75 < found.ratio("ttft_s", "p50") < 1.5
    assert 0.9 < found.ratio("itl_s", "p50") < 1.25


async def test_groups_start_cold_and_leave_as_ordered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PacedPlan((1, 1), (1, 2), cold_start_s=COLD_START_S)
    trace = steady(3.0, 12.0, 3, Lengths(200, 24))
    async with paced_cluster(folder, PacedHardware.load(folder), plan) as cluster, cluster.channel() as channel:
        monkeypatch.setenv(SECRET_VARIABLE, cluster.secret.text)
        playing = asyncio.create_task(play(channel, trace, seed=3))
        ordered_s = time.monotonic()
        assert await scale(cluster, 2) == 0
        assert cluster.history[-1].num_ready == (1, 2)
        assert cluster.history[-1].since_s >= ordered_s + COLD_START_S
        assert await scale(cluster, 1) == 0
        assert cluster.history[-1].num_ready == (1, 1)
        await check_served(cluster, await playing)


async def scale(cluster: PacedCluster, num_groups: int) -> int:
    """As an operator does; the command's exit status."""
    return await asyncio.to_thread(main, ["scale", "generate", str(num_groups), "--target", cluster.endpoint])


async def check_served(cluster: PacedCluster, played: Played) -> None:
    """All requests have all their tokens, some of them those of the tiny model; nothing is held afterwards."""
    assert not played.errors
    assert [len(fate.token_ids) for fate in played.fates] == played.trace.output_tokens.tolist()
    decoder = await asyncio.to_thread(load_decoder, cluster.folder, dtype="float32")
    for number in np.linspace(0, len(played.fates) - 1, 8).astype(int).tolist():
        tokens = played.prompt(number), played.fates[number].token_ids
        await asyncio.to_thread(check_equal_tokens, decoder, *tokens, played.params(number))
    async with cluster.channel() as channel:
        stub = OrchestratorStub(channel)

        async def held() -> list[int]:
            state = await stub.GetClusterState(pb.GetClusterStateRequest(), timeout=10)
            imbalances = [group.generation.imbalance for group in state.groups if group.HasField("generation")]
            assert not any(imbalances), imbalances
            return [state.num_queued, state.num_running, *(held_by(group) + group.num_leaked for group in state.groups)]

        await eventually(held, lambda counts: not any(counts), within_s=10)
