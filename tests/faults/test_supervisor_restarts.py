"""Any single failure in a restarted supervisor: the cluster serves. The supervisor's first incarnation (process) ends
with the failure."""

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RaySystemError

from baton.errors import UnavailableError
from deploy.config.file import load_config
from deploy.ray_cluster import memory, supervisor
from deploy.ray_cluster.memory import Memory
from deploy.ray_cluster.supervisor import SupervisorActor
from orchestrator.membership.view import Orders
from tests.support.clusters.failing_spawner import FailingSpawner, Failures
from tests.support.clusters.supervision import CountedRoom
from tests.support.clusters.workers import InProcessSpawner
from tests.support.eventually import LIMIT_S
from tests.support.wire.secret import SECRET

pytestmark = pytest.mark.integration

RAY_ERROR = RaySystemError("the GCS does not answer")  # type: ignore[no-untyped-call]
FULL = OSError(errno.ENOSPC, "No space left on device")
NAME = "baton"


class FailingRoom(CountedRoom):
    """Room whose reservations fail as listed. Implements Room."""

    needs = None

    def __init__(self, failures: Failures) -> None:
        super().__init__(8)
        self.places: dict[str, object] = {}
        self._failures = failures

    async def reserve(self, group: str, num_workers: int) -> None:
        self._failures.strike("reserve")
        await super().reserve(group, num_workers)

    async def reserve_all(self, sizes: dict[str, int]) -> None:
        for name, size in sizes.items():
            await self.reserve(name, size)


@dataclass
class Scene:
    """A supervisor without Ray: workers and orchestrator are servers of its thread, Ray's store is a dict."""

    folder: Path
    failures: Failures = field(default_factory=Failures)
    kept: dict[str, Any] = field(default_factory=dict)
    spawner: InProcessSpawner = field(default_factory=InProcessSpawner)

    def replace_ray(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace what the supervisor asks Ray for."""
        context = SimpleNamespace(get_node_id=lambda: "node")
        monkeypatch.setattr(supervisor, "ray", SimpleNamespace(get_runtime_context=lambda: context))
        monkeypatch.setattr(supervisor, "RaySpawner", lambda *given: FailingSpawner(self.spawner, self.failures))
        monkeypatch.setattr(supervisor, "RayRoom", lambda *given, **more: FailingRoom(self.failures))
        monkeypatch.setattr(memory, "_internal_kv_get", self.get)
        monkeypatch.setattr(memory, "_internal_kv_put", self.put)
        monkeypatch.setattr(memory, "_internal_kv_del", lambda key, namespace: self.kept.pop(key, None))
        monkeypatch.setattr(memory, "_internal_kv_list", self.list)
        monkeypatch.setattr(supervisor, "folder_on_node", self.find_folder)
        monkeypatch.setattr(supervisor, "end_worker", self.end_worker)

    def get(self, key: str, namespace: str) -> Any:
        self.failures.strike("get")
        return self.kept.get(key)

    def put(self, key: str, value: Any, namespace: str, *, overwrite: bool = True) -> bool:
        self.failures.strike("put")
        existed = key in self.kept
        if overwrite or not existed:
            self.kept[key] = value
        return existed

    def list(self, prefix: str, namespace: str) -> list[bytes]:
        self.failures.strike("list")
        return [key.encode() for key in self.kept if key.startswith(prefix)]

    def find_folder(self, place: object) -> Path:
        self.failures.strike("find_folder")
        return self.folder

    async def end_worker(self, namespace: str, name: str) -> None:
        for worker in self.spawner.made:
            if worker.config.name == name:
                await worker.close()

    @contextmanager
    def living(self) -> Iterator[SupervisorActor]:
        """One incarnation of the supervisor, which ends by `stop`."""
        settings = ("prefill.num_groups=0", "supervision.heartbeat_s=0.05", f"model.name={self.folder}")
        made = SupervisorActor(load_config(None, settings), self.folder, (), "store", SECRET)
        try:
            yield made
        finally:
            made.stop()
            made._loop.run_until_complete(made._loop.shutdown_default_executor())
            made._loop.close()  # an actor's ends with its process
        assert all(worker.ended for worker in self.spawner.made)


@pytest.fixture
def scene(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    made = Scene(smollm2)
    made.replace_ray(monkeypatch)
    return made


def until(made: SupervisorActor, is_reached: Callable[[], bool]) -> None:
    """Returns when the supervisor has reached that state."""
    pause = threading.Event()
    for _ in range(int(LIMIT_S / 0.05)):
        if is_reached():
            return
        pause.wait(0.05)
    raise AssertionError(made.state())


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("get", RAY_ERROR),
        ("put", RAY_ERROR),
        ("put", FULL),
        ("list", RAY_ERROR),
        ("reserve", UnavailableError("generate-0.0 waits for a node with room for generate-0")),
        ("start", UnavailableError("generate-0.0 ended before it served")),
        ("start", RAY_ERROR),
        ("find_folder", FULL),
    ],
)
def test_a_later_life_serves_after_any_failure(call: str, error: Exception, scene: Scene) -> None:
    Memory(Orders()).save(NAME)
    scene.failures.due[call] = error
    with scene.living() as made:
        until(made, lambda: made.state().phase == "running" and bool(made.state().pids))
        assert scene.failures.num_raised == 1
        assert any(str(error) in line for line in made.state().reports)


@pytest.mark.parametrize("call", ["put", "reserve", "start", "find_folder"])
def test_a_first_life_ends_with_its_first_failure(call: str, scene: Scene) -> None:
    scene.failures.due[call] = UnavailableError(f"no {call}")
    with scene.living() as made:
        until(made, lambda: made.state().phase == "failed")
        assert made.state().error == f"no {call}"
    assert memory.KEY not in scene.kept
