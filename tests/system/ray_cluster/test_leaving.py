"""Clusters on Ray from start to end, configured by the machine or by the operator. However a cluster ends, it leaves
nothing behind."""

import os
import re
from pathlib import Path

import pytest

from baton import Client, SamplingParams
from baton.modeling.checkpoints.weights import load_decoder
from tests.support.clusters.on_ray.ray_clusters import (
    START_S,
    launched,
    processes_of,
    recorded_folder,
    run_baton,
    served,
    shared_files,
    until,
)
from tests.support.models.reference import check_equal_tokens

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

PROMPT = tuple(range(100, 140))
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
UP = r"^Ray is up, (\d+\.\d) s after the start$"
READY = r"^ready: .* \((\d+\.\d) s after the start, (\d+\.\d) s after Ray\)$"
ARRANGED = r"^arrangement for \d+ cores?: (1 engine|1 chain of (\d+) ranks?)"


def check_nothing_is_left(cache: Path, ray_folder: str) -> None:
    assert not processes_of(ray_folder)
    assert not Path(ray_folder).exists()
    assert not shared_files(cache)
    assert not list((cache / "baton" / "clusters").iterdir())


def test_a_cluster_is_as_its_machine_is_arranged_and_is_stopped(smollm2: Path, tmp_path: Path) -> None:
    with served(tmp_path, smollm2, is_arranged=True) as running:
        arranged = re.search(ARRANGED, running.stderr, re.MULTILINE)
        assert arranged, running.stderr
        up, ready = (re.search(line, running.stderr, re.MULTILINE) for line in (UP, READY))
        assert up and ready, running.stderr
        assert float(up[1]) <= float(ready[1]) - float(ready[2]) + 0.2, "rounded"
        num_ranks = int(arranged[2] or 0)
        with Client(running.target) as client:
            until(lambda: sum(len(group.ranks) for group in client.cluster_state().groups) == num_ranks)
            answer = client.generate(token_ids=PROMPT, params=PARAMS).collect()
        workers = [pid for pid, command in processes_of(running.ray_folder).items() if "WorkerActor" in command]
        priorities = {os.getpriority(os.PRIO_PROCESS, pid) for pid in workers}
        assert priorities == {os.getpriority(os.PRIO_PROCESS, 0)}, "Ray lowers its workers' by itself"
        assert shared_files(tmp_path)
        stopped = running.command("stop")
        assert stopped.returncode == 0, stopped.stderr
    check_nothing_is_left(tmp_path, running.ray_folder)
    token_ids = [token.token_id for token in answer.tokens]
    assert len(token_ids) == PARAMS.max_tokens
    check_equal_tokens(load_decoder(smollm2), PROMPT, token_ids, PARAMS)


def test_an_operators_choice_for_ray_stays_and_nothing_without_its_launcher(letters: Path, tmp_path: Path) -> None:
    chosen = {"RAY_AUTH_MODE": "disabled"}
    with served(tmp_path, letters, "prefill.num_ranks=1", environment=chosen) as running:
        commands = {pid: command.split()[0] for pid, command in processes_of(running.ray_folder).items()}
        of_ray = [pid for pid, command in commands.items() if command.endswith(("/gcs_server", "/raylet"))]
        assert len(of_ray) == 2  # the others write their names over their variables
        variables = [(Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0") for pid in of_ray]
        assert all(b"RAY_AUTH_MODE=disabled" in each for each in variables)
        running.process.kill()
        running.process.wait()
        stopped = run_baton(tmp_path, "stop", environment=chosen)
        assert stopped.returncode == 0, stopped.stderr
    check_nothing_is_left(tmp_path, running.ray_folder)


@pytest.mark.nightly
def test_nothing_is_left_of_an_interrupted_cluster(letters: Path, tmp_path: Path) -> None:
    with served(tmp_path, letters, "prefill.num_ranks=1") as running:
        running.interrupt()
        assert running.process.wait(60) == 0
    check_nothing_is_left(tmp_path, running.ray_folder)


@pytest.mark.parametrize("line", [pytest.param("starting Ray", marks=pytest.mark.nightly), "starting 2 workers"])
def test_nothing_is_left_of_an_interrupted_start(letters: Path, tmp_path: Path, line: str) -> None:
    with launched(tmp_path, letters, "prefill.num_ranks=1") as starting:
        until(lambda: line in starting.stderr, START_S)
        folder = recorded_folder(tmp_path)
        until(lambda: bool(processes_of(folder)))
        starting.interrupt()
        assert starting.process.wait(60) == 0
    assert starting.stderr.splitlines()[-1] == "cluster baton is gone"
    check_nothing_is_left(tmp_path, folder)
