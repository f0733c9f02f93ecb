"""What is said of an engine that hangs or is slow, where no supervisor looks after it."""

import asyncio
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest

from baton.process.clock import SystemClock
from baton.v1.generate_pb2 import GenerationStatus
from baton_lab.chaos import engine_faults
from baton_lab.chaos.cluster import ChaosCluster
from baton_lab.chaos.engine_faults import EngineTrials
from deploy.groups.surroundings import Heartbeat
from generate_workers.config import EngineConfig
from tests.support.clusters.processes.named_thread import child

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds single threads"),
]
NAME = "generate-0"


@dataclass
class Engine:
    """A worker that serves nothing."""

    process: subprocess.Popen[str]
    config: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(section=EngineConfig(8, 64, watchdog_floor_s=0.1))
    )
    replaced: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    async def wait(self) -> str:
        return f"status {await asyncio.to_thread(self.process.wait)}"


@dataclass
class Unsupervised:
    """A cluster of that engine."""

    engine: Engine
    status: GenerationStatus
    heartbeat = Heartbeat(0.05, 1.0)

    def worker(self, name: str) -> Engine:
        assert name == NAME
        return self.engine

    async def engine_status(self, name: str, timeout_s: float) -> GenerationStatus:
        return self.status


def trials(process: subprocess.Popen[str], num_active: int = 1, start_s: float = 60.0) -> tuple[Engine, EngineTrials]:
    engine = Engine(process)
    cluster = Unsupervised(engine, GenerationStatus(num_active=num_active, num_steps=7))
    return engine, EngineTrials(cast(ChaosCluster, cluster), SystemClock(), late_s=0.1, start_s=start_s)


async def test_hung_engine_that_is_not_killed_does_not_hold() -> None:
    with child() as process:
        trial = await trials(process)[1].hang(NAME)
    if "cannot be held" in trial.note:
        pytest.skip(trial.note)
    assert (trial.happened, trial.holds) == (True, False)
    assert trial.note == "generate-0 hung for 0.3 s and was not killed"


async def test_hung_engine_that_is_not_replaced_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    with child() as process:
        engine, faults = trials(process)
        waits = engine.wait

        async def killed() -> str:
            process.kill()
            faults._start_s = 0.1
            return await waits()

        monkeypatch.setattr(engine, "wait", killed)
        trial = await faults.hang(NAME)
    if "cannot be held" in trial.note:
        pytest.skip(trial.note)
    assert not trial.holds and "did not serve again" in trial.note


async def test_engine_without_sequences_is_not_hung_and_that_is_said() -> None:
    with child() as process:
        trial = await trials(process, num_active=0, start_s=0.5)[1].hang(NAME)
    assert (trial.happened, trial.holds) == (False, True)
    assert trial.note.startswith("SKIPPED: generate-0 was not hung")


async def test_thread_that_may_not_be_held_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(request: int, thread_id: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("baton_lab.chaos.held_thread._ptrace", refuses)
    with child() as process:
        trial = await trials(process)[1].hang(NAME)
    assert (trial.happened, trial.holds) == (False, True)
    assert trial.note.startswith("SKIPPED: generate-0 was not hung, its thread cannot be held: ")


@pytest.mark.parametrize(("dies", "note"), [(True, "was ended"), (False, "0 steps")])
async def test_slow_engine_that_ends_or_makes_no_step_does_not_hold(
    dies: bool, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_faults, "SLOW_S", 0.2)
    with child() as process:
        if dies:
            process.kill()
            process.wait(60)
        trial = await trials(process)[1].slow(NAME)
    assert not trial.holds and note in trial.note
