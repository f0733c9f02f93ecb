"""A cluster on its own Ray instance does not accept other users of the machine and peers on its network."""

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from deploy.commands.cluster_secrets import token_path
from tests.support.clusters.listening import Listener, descendants, listeners
from tests.support.clusters.on_ray.ray_clusters import ServedCluster, processes_of, run_baton, secret_of

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
NUM_WORKERS = 5
"""Two ranks, two engines and the orchestrator."""
JOIN = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False); print(ray.cluster_resources())"

pytestmark = [pytest.mark.cluster, pytest.mark.ci]


def pids_of(one_host: ServedCluster) -> set[int]:
    return descendants(one_host.process.pid) | processes_of(one_host.ray_folder).keys()


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
                ask(b"", timeout=60)
                found.add(grpc.StatusCode.OK)
            except grpc.RpcError as error:
                found.add(error.code())
    return found


def test_whatever_speaks_grpc_refuses_a_stranger(one_host: ServedCluster) -> None:
    listening = listeners(pids_of(one_host))
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
def test_nobody_joins_its_ray_without_the_token(
    one_host: ServedCluster, tmp_path: Path, choice: dict[str, str]
) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    variables |= {"HOME": str(tmp_path), "RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} | choice
    command = [sys.executable, "-c", JOIN, one_host.ray_address]
    joined = subprocess.run(command, env=variables, text=True, capture_output=True, timeout=100)
    assert joined.returncode and not joined.stdout
    assert "AuthenticationError" in joined.stderr, joined.stderr


def test_who_has_its_token_is_let_into_its_ray(one_host: ServedCluster, tmp_path: Path) -> None:
    lone = ("gateway", "--address", one_host.ray_address, "--cluster", "lone")
    reason = f"baton: cluster lone on Ray at {one_host.ray_address} does not serve: "
    assert one_host.command(*lone).stderr.startswith(reason)  # its own user
    token = {"RAY_AUTH_TOKEN_PATH": str(token_path(one_host.record))}
    assert run_baton(tmp_path, *lone, environment=token).stderr.startswith(reason)  # an operator's choice
    refused = run_baton(tmp_path, *lone, environment={"RAY_AUTH_MODE": "disabled"})
    assert refused.returncode and "asks for a token" in refused.stderr


def test_its_files_are_its_users_alone(one_host: ServedCluster) -> None:
    secrets, ray = one_host.record.with_suffix(".secrets"), Path(one_host.ray_folder)
    assert stat.S_IMODE(secrets.stat().st_mode) == stat.S_IMODE(ray.stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in secrets.iterdir()} == {
        "cluster_secret": 0o600,
        "ray_token": 0o600,
    }
    beside = [path for path in one_host.record.parent.rglob("*") if path.lstat().st_mode & 0o022]
    assert beside == []  # what Ray opens to all, below its folder, nobody reaches


def test_secrets_are_in_no_command_line_and_no_log(one_host: ServedCluster) -> None:
    kept = [secret_of(one_host.cache).text, token_path(one_host.record).read_text()]
    lines = [(Path("/proc") / str(pid) / "cmdline").read_bytes().decode() for pid in pids_of(one_host)]
    logs = [path for path in Path(one_host.ray_folder).rglob("*") if path.is_file() and not path.is_symlink()]
    assert logs
    texts = [*lines, one_host.stdout, one_host.stderr, *(path.read_text(errors="replace") for path in logs)]
    assert not any(secret in text for secret in kept for text in texts)
