"""What a Ray that `baton serve` starts declares, and what the launcher outlives once its cluster serves."""

import argparse
import errno
import os
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import ActorUnavailableError, RaySystemError, RayTaskError
from safetensors.torch import save_file

from baton.errors import UnavailableError
from baton.transport.identity import ClusterSecret
from deploy.commands import serve
from deploy.commands.record import ClusterRecord
from deploy.commands.serve import _Launch, declared_pools
from deploy.config.cluster import ClusterConfig
from deploy.config.file import load_config
from deploy.machine.cluster_plan import ClusterPlan
from deploy.machine.resolved_model import ResolvedModel
from deploy.machine.this_machine import GpuState, Machine
from deploy.ray_cluster import supervisor_state
from deploy.ray_cluster.supervisor_state import SupervisorState
from tests.support.models.config_folders import SMALL, write_config
from tests.support.sysfs import flat_nodes


@pytest.mark.parametrize(
    ("num_cores", "settings", "pools"),
    [
        (2, (), (4, 2)),  # one group of two ranks and one engine, and one more of each
        (64, (), (64, 2)),  # an engine takes all cores
        (64, ("prefill.num_threads=8", "generate.num_threads=16"), (8, 4)),
        (2, ("prefill.num_groups=3", "prefill.num_ranks=4", "generate.num_groups=5"), (16, 6)),
        (2, ("prefill.num_groups=0",), (2, 2)),
        (2, ("autoscaling.mode=act", "autoscaling.max=4"), (8, 4)),  # at most three of one role
    ],
)
def test_pools_are_as_large_as_the_cores_and_the_configuration_make_them(
    num_cores: int, settings: tuple[str, ...], pools: tuple[int, int]
) -> None:
    config = load_config(None, settings)
    assert declared_pools(config, num_cores) == dict(zip(("baton_prefill", "baton_generate"), pools, strict=True))


class Scene:
    """A launcher whose Ray gives the supervisor's answers as listed; then the user ends the launcher."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *answers: object, head_wait_s: float = 60
    ) -> None:
        self.answers = list(answers)
        self.stopping = threading.Event()
        self.saved: list[str] = []
        """Endpoints of the records that were saved."""
        self.failures_to_save: list[OSError] = []
        self.ended: list[bool] = []
        """For each end of the supervisor, whether the user had asked for it."""
        settings = ("supervision.heartbeat_s=0.01", f"ray.head_wait_s={head_wait_s}")
        record = ClusterRecord("baton", 1, "1", "127.0.0.1:6379", "")
        config = load_config(None, settings)
        self.launch = _Launch(
            ClusterPlan(config, ResolvedModel(tmp_path)), (), record, secret=ClusterSecret.new(), door=None
        )
        supervisor = SimpleNamespace(state=SimpleNamespace(remote=lambda: None))
        monkeypatch.setattr(self.launch, "_make", lambda: supervisor)
        monkeypatch.setattr(ray, "get", lambda reference, timeout: self._answer())
        monkeypatch.setattr(ClusterRecord, "save", lambda made: self._save(made))
        monkeypatch.setattr(supervisor_state, "end_supervisor", lambda name: self.ended.append(self.stopping.is_set()))

    def _answer(self) -> object:
        answer = self.answers.pop(0)
        if not self.answers:
            self.stopping.set()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _save(self, record: ClusterRecord) -> None:
        if self.failures_to_save:
            raise self.failures_to_save.pop(0)
        self.saved.append(record.endpoint)


SERVES = SupervisorState(1, "node", phase="running", endpoint="127.0.0.1:50051", reports=("x",), num_reports=1)
RAY_ERROR = RaySystemError("the GCS does not answer")  # type: ignore[no-untyped-call]
OF_SUPERVISOR = RayTaskError("state", "its traceback", ValueError("a bug"))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "error", [RAY_ERROR, OF_SUPERVISOR, RuntimeError("a bug"), KeyError("pid"), ActorUnavailableError("x", None)]
)
def test_a_failing_launcher_ends_no_cluster_that_serves(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    moved, head_wait_s = replace(SERVES, endpoint="127.0.0.1:50052"), 60 if error is RAY_ERROR else 0
    scene = Scene(monkeypatch, tmp_path, SERVES, error, error, moved, head_wait_s=head_wait_s)
    scene.launch.run(scene.stopping)
    assert scene.saved == ["127.0.0.1:50051", "127.0.0.1:50052"]
    assert scene.ended == [True]


def test_a_record_that_cannot_be_saved_is_told_once_and_saved_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = Scene(monkeypatch, tmp_path, *[SERVES] * 4)
    scene.failures_to_save = [OSError(errno.ENOSPC, "No space left on device")] * 2
    scene.launch.run(scene.stopping)
    assert scene.saved == ["127.0.0.1:50051"] and scene.ended == [True]
    told = capsys.readouterr().err
    assert told.count("record cannot be saved ([Errno 28] No space left on device)") == told.count("ready: ") == 1


@pytest.mark.parametrize("error", [BrokenPipeError(errno.EPIPE, "Broken pipe"), ValueError("I/O on a closed file")])
def test_lines_that_cannot_be_printed_end_nothing(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(text: str) -> int:
        raise error

    scene = Scene(monkeypatch, tmp_path, SERVES, replace(SERVES, num_reports=2))
    monkeypatch.setattr(sys.stderr, "write", fail)
    scene.launch.run(scene.stopping)
    assert scene.ended == [True]


@pytest.mark.parametrize("serves", [False, True])
def test_without_ray_the_launcher_ends_and_leaves_alone_what_served(
    serves: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scene = Scene(monkeypatch, tmp_path, *[SERVES] * serves, RAY_ERROR, SERVES, head_wait_s=0)
    with pytest.raises(UnavailableError, match="Ray has not answered for 0 s" if serves else "Ray is gone"):
        scene.launch.run(scene.stopping)
    assert scene.ended == ([] if serves else [False])


def test_an_unforeseen_failure_of_a_start_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scene = Scene(monkeypatch, tmp_path, RuntimeError("a bug"), SERVES)
    with pytest.raises(RuntimeError, match="a bug"):
        scene.launch.run(scene.stopping)
    assert scene.ended == [False]


def test_a_ray_that_does_not_come_up_in_time_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: Any) -> str:
        raise Exception("The current node timed out during startup.\nThis could happen because ...")  # as Ray does

    monkeypatch.setattr(serve, "_start_ray", late)
    with pytest.raises(UnavailableError, match="^Ray on this machine cannot be reached: The current node timed out"):
        serve._connect(load_config(None), "/tmp")


@pytest.mark.usefixtures("cache")
def test_ray_sees_only_the_gpus_that_are_used_and_the_user_is_told_of_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_config(tmp_path / "model", SMALL)
    save_file({"weight": torch.zeros(8)}, folder / "model.safetensors")
    free = {0: 2**34, 1: 2**20, 2: 2**34}
    gpus = tuple(GpuState(index, "NVIDIA L4", 2**34, free[index], f"GPU-{index}") for index in free)
    machine = Machine(flat_nodes(2), 2**36, 2**30, None, gpus=gpus)

    def no_ray(config: ClusterConfig) -> Any:
        raise UnavailableError(f"{config.num_gpus} GPUs of {os.environ['CUDA_VISIBLE_DEVICES']}")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setattr(serve, "prepare_machine", lambda console: machine)
    monkeypatch.setattr(serve, "examine", lambda plan, machine: [])
    monkeypatch.setattr(serve, "http_door", lambda *args: nullcontext())
    monkeypatch.setattr(serve, "_ray", no_ray)
    args = argparse.Namespace(set=[f"model.name={folder}", "name=gpus"], address="", config=None)
    with pytest.raises(UnavailableError, match="2 GPUs of GPU-0,GPU-2"):
        serve.serve(args)
    told = capsys.readouterr().err
    assert "warning: not used: GPU 1, 0.00 GiB free of " in told and "end the processes that use it" in told
    assert "arrangement for 2 x NVIDIA L4: 2 engines of 1 GPU (" in told.replace("\n", " ")
