"""A cluster on a Ray of its own, as another user of the machine and a peer on its network see it: closed."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from deploy.commands.cluster_secrets import token_path
from tests.support.clusters.listening import Listener, descendants, listeners
from tests.support.clusters.ray_clusters import START_S, ServedCluster, launched, processes_of, secret_of, served, until

METHODS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.CoreWorkerService/PushTask",
    "/baton.v1.KvReceiver/Reserve",
    "/baton.v1.PrefillRank/StartEpoch",
    "/baton.v1.Keeping/Update",
    "/baton.v1.Admin/Drain",
)
"""One of each service that a process of the cluster serves to others."""
NO_GRPC = grpc.StatusCode.UNAVAILABLE
REFUSED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}
"""Services that are not there are unimplemented."""
NUM_WORKERS = 4
"""Two ranks, an engine and the orchestrator."""
JOIN = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False); print(ray.cluster_resources())"

pytestmark = [pytest.mark.cluster, pytest.mark.ci]


@pytest.fixture(scope="module")
def cluster(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    with served(tmp_path_factory.mktemp("cache"), smollm2, "generate.num_slots=2") as running:
        yield running


def record(cluster: ServedCluster) -> Path:
    return cluster.cache / "baton" / "clusters" / "baton.json"


def ray_address(cluster: ServedCluster) -> str:
    return str(json.loads(record(cluster).read_text())["ray_address"])


def pids_of(cluster: ServedCluster) -> set[int]:
    return descendants(cluster.process.pid) | processes_of(cluster.ray_folder).keys()


def answers(listener: Listener) -> set[grpc.StatusCode]:
    """What becomes of a stranger's calls to that port."""
    found = set()
    with grpc.insecure_channel(f"127.0.0.1:{listener.port}") as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=30)
        except grpc.FutureTimeoutError:
            return {NO_GRPC}
        for method in METHODS:
            ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
            try:
                ask(b"", timeout=10)
                found.add(grpc.StatusCode.OK)
            except grpc.RpcError as error:
                found.add(error.code())
    return found


def test_whatever_speaks_grpc_refuses_a_stranger(cluster: ServedCluster) -> None:
    listening = listeners(pids_of(cluster))
    with ThreadPoolExecutor(len(listening)) as pool:
        found = dict(zip(listening, pool.map(answers, listening), strict=True))
    told = {each: codes for each, codes in found.items() if NO_GRPC not in codes}
    assert {code for codes in told.values() for code in codes} == REFUSED
    refusing = {each.command.split()[0] for each, codes in told.items() if grpc.StatusCode.UNAUTHENTICATED in codes}
    of_workers = [each for each, codes in told.items() if "WorkerActor" in each.command and codes == REFUSED]
    assert len(of_workers) == 2 * NUM_WORKERS + 1  # of Ray's, of Baton's, and one for clients
    assert any("gcs_server" in name for name in refusing) and any("raylet" in name for name in refusing), refusing


@pytest.mark.parametrize(
    "choice",
    [
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_AUTH_MODE": "token"},
        pytest.param({"RAY_AUTH_TOKEN": "0" * 64}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_nobody_joins_its_ray_without_the_token(cluster: ServedCluster, tmp_path: Path, choice: dict[str, str]) -> None:
    address = ray_address(cluster)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    variables |= {"HOME": str(tmp_path), "RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} | choice
    command = [sys.executable, "-c", JOIN, address]
    joined = subprocess.run(command, env=variables, text=True, capture_output=True, timeout=100)
    assert joined.returncode and not joined.stdout
    assert "AuthenticationError" in joined.stderr, joined.stderr


def test_another_cluster_of_its_user_joins_its_ray(cluster: ServedCluster, smollm2: Path, tmp_path: Path) -> None:
    same_user = {"XDG_CACHE_HOME": str(cluster.cache)}
    settings = ("name=second", "prefill.num_groups=0", "generate.num_slots=2")
    with launched(tmp_path, smollm2, *settings, address=ray_address(cluster), environment=same_user) as second:
        until(lambda: second.process.poll() is not None or "\nready: " in second.stderr, START_S)
        assert "\nready: " in second.stderr, second.stderr


def test_its_files_are_its_users_alone(cluster: ServedCluster) -> None:
    secrets, ray = record(cluster).with_suffix(".secrets"), Path(cluster.ray_folder)
    assert stat.S_IMODE(secrets.stat().st_mode) == stat.S_IMODE(ray.stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in secrets.iterdir()} == {
        "cluster_secret": 0o600,
        "ray_token": 0o600,
    }
    beside = [path for path in record(cluster).parent.rglob("*") if path.lstat().st_mode & 0o022]
    assert beside == []  # what Ray opens to all, below its folder, nobody reaches


def test_secrets_are_in_no_command_line_and_no_log(cluster: ServedCluster) -> None:
    kept = [secret_of(cluster.cache).text, token_path(record(cluster)).read_text()]
    lines = [(Path("/proc") / str(pid) / "cmdline").read_bytes().decode() for pid in pids_of(cluster)]
    logs = [path for path in Path(cluster.ray_folder).rglob("*") if path.is_file() and not path.is_symlink()]
    assert logs
    texts = [*lines, cluster.stdout, cluster.stderr, *(path.read_text(errors="replace") for path in logs)]
    assert not any(secret in text for secret in kept for text in texts)


def test_an_operators_choice_for_ray_stays(smollm2: Path, tmp_path: Path) -> None:
    chosen = {"RAY_AUTH_MODE": "disabled"}
    with served(tmp_path, smollm2, "prefill.num_ranks=1", environment=chosen) as running:
        commands = {pid: command.split()[0] for pid, command in processes_of(running.ray_folder).items()}
        of_ray = [pid for pid, command in commands.items() if command.endswith(("/gcs_server", "/raylet"))]
        assert len(of_ray) == 2  # the others write their names over their variables
        variables = [(Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0") for pid in of_ray]
        assert all(b"RAY_AUTH_MODE=disabled" in each for each in variables)
