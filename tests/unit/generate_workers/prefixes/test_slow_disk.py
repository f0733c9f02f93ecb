"""A disk of cached prefixes that stops answering after it was opened: its worker lives on, and serves without it.

Reading a block blocks as on a dead file server: the block's file is replaced by a FIFO that nobody writes to.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.modeling.prefix_store.disk_tier import ANSWER_S
from baton.modeling.prefix_store.folder import node_folder
from baton.sampling_params import SamplingParams
from baton.transport.channel import make_channel
from baton.v1 import generate_pb2
from baton.v1.generate_pb2_grpc import GenerationGroupStub
from deploy.config.file import WrittenConfig
from tests.support.clusters.clients import Answer
from tests.support.clusters.kept import KeptCluster, kept
from tests.support.engines.generation import prompt
from tests.support.eventually import eventually
from tests.support.models.letter_models import write_letter_model
from tests.support.wire.secret import SECRET

pytestmark = pytest.mark.integration

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
WARM = prompt(300, seed=1)
"""Two whole blocks."""
NUM_COLD = 10
STATUS_S = 0.05
DEAD_AFTER_S = 30.0
"""A crowded machine may hold up a sound worker for many seconds."""


@dataclass
class Served:
    """A cluster of one engine, and the folders in which it keeps blocks."""

    cluster: KeptCluster
    in_memory: Path
    on_disk: Path

    @property
    def pid(self) -> int:
        handle = self.cluster.cluster.generation[0].workers[0].handle
        assert handle is not None
        return handle.pid

    async def ask(self, ids: tuple[int, ...]) -> Answer:
        """Ask, and check that the first attempt served it."""
        answer = await self.cluster.ask(self.cluster.request(ids, PARAMS))
        assert len(answer.token_ids) == PARAMS.max_tokens
        assert answer.end.usage.num_attempts == 1
        return answer

    async def num_sunk(self) -> int:
        """Return the number of complete blocks on disk."""
        return len(await asyncio.to_thread(self._sunk))

    def _sunk(self) -> list[Path]:
        return [path for path in self.on_disk.glob("*/*") if not path.name.startswith(".")]

    def block(self) -> list[Path]:
        """Let reads of all blocks block: they are no longer in memory, and FIFOs on disk."""
        paths = self._sunk()
        for path in paths:
            (self.in_memory / path.name).unlink(missing_ok=True)
            os.mkfifo(path.with_name(f".{path.name}"), 0o600)
            path.with_name(f".{path.name}").replace(path)
        return paths


def release(paths: list[Path]) -> None:
    """Let the blocked reads go on: they find no block."""
    for path in paths:
        with contextlib.suppress(OSError):  # nobody reads it, or it was removed
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        path.unlink(missing_ok=True)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    name, model, disk = f"slow-disk-{os.getpid()}", tmp_path / "model", tmp_path / "disk"
    model.mkdir()
    disk.mkdir()
    config = WrittenConfig(
        {
            "name": name,
            "model": {"dtype": "float32", "cache": str(disk)},
            "prefill": {"num_groups": 0, "prefix_disk_bytes": "1GiB"},
            "generate": {"num_threads": 1, "num_slots": 4},
            "orchestrator": {"port": 0},
            "supervision": {"dead_after_s": DEAD_AFTER_S},
        }
    ).config
    made = KeptCluster(config=config, folder=write_letter_model(model))
    async with kept(made):
        yield Served(made, node_folder(name), disk)


@pytest.mark.parametrize(
    ("blocked_s", "is_timed"),
    [
        pytest.param(None, False, marks=pytest.mark.ci, id="forever"),
        pytest.param(None, True, marks=pytest.mark.nightly, id="forever-timed"),
        pytest.param(3.0, True, marks=pytest.mark.nightly, id="three-seconds-timed"),
    ],
)
async def test_a_worker_whose_disk_stops_answering_serves_without_it(
    served: Served, blocked_s: float | None, is_timed: bool
) -> None:
    pid = served.pid
    assert (await served.ask(WARM)).end.usage.num_cached_tokens == 0
    await eventually(served.num_sunk, lambda number: number >= 2)
    endpoint = served.cluster.cluster.view(4, 512).generation[0].endpoint
    async with make_channel(endpoint, secret=SECRET) as channel:
        stub, took_s = GenerationGroupStub(channel), list[float]()

        async def fault() -> str:
            begun_s = time.monotonic()
            status = await stub.GetStatus(generate_pb2.GenerationStatusRequest(), timeout=DEAD_AFTER_S)
            took_s.append(time.monotonic() - begun_s)
            return str(status.prefix_store.disk_fault)

        await fault()
        paths = await asyncio.to_thread(served.block)
        if blocked_s is not None:
            asyncio.get_running_loop().call_later(blocked_s, release, paths)
        del took_s[:]
        blocked = asyncio.create_task(served.ask(WARM))
        await eventually(fault, lambda reason: "does not answer" in reason)
        for seed in range(NUM_COLD):
            assert (await served.ask(prompt(200, seed=10 + seed))).end.usage.num_cached_tokens == 0
            await fault()
        assert (await blocked).end.usage.num_cached_tokens == 0
        if is_timed:  # on an idle machine
            assert sorted(took_s)[len(took_s) * 9 // 10] < STATUS_S
            assert max(took_s) < ANSWER_S / 2, "a status waited for the disk"
        if blocked_s is None:
            assert "does not answer" in await fault()
            release(paths)
        await eventually(fault, lambda reason: not reason)
    assert served.pid == pid
