"""Clusters on Ray for tests. The command that users type starts a cluster, and its processes are found by the ports on
which they listen."""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import grpc

from baton import Client
from baton.calls.cluster_state import ClusterState
from baton.channel_options import Keepalive, channel_options
from baton.errors import BatonError
from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.prefix_store.folder import node_folder
from baton.results.completion import Completion
from baton.sampling_params import SamplingParams
from baton.settings.paths import cache_folder
from baton.transport.identity import ClusterSecret
from baton.v1.prefill_pb2 import PrefillStatusRequest
from baton.v1.prefill_pb2_grpc import PrefillRankStub
from deploy.commands.cluster_secrets import load_secret
from deploy.commands.keyed_channel import keyed
from deploy.commands.record import process_start, store_name
from tests.support.clusters.on_ray.hosts import MACHINE, Host
from tests.support.engines.generation import prompt
from tests.support.folders import ROOT
from tests.support.models.reference import check_equal_tokens

START_S = 400.0
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
_STDOUT, _STDERR = "stdout.txt", "stderr.txt"


@dataclass
class ServedCluster:
    """A `baton serve` process. `target` and `ray_folder` are set once the cluster serves."""

    process: "subprocess.Popen[str]"
    cache: Path
    """Value of XDG_CACHE_HOME for the cluster's commands."""
    target: str
    """Address (host:port) of the orchestrator."""
    ray_folder: str
    """Folder of the Ray instance that the cluster started; empty if the cluster joined an existing Ray instance."""
    model: Path
    """Folder of the served model."""
    host: Host = MACHINE
    """Host on which the cluster was launched and on which further commands run."""

    @property
    def record(self) -> Path:
        """Return the path of the file in which other commands of the same user find the cluster's address."""
        return self.cache / "baton" / "clusters" / "baton.json"

    @property
    def ray_address(self) -> str:
        """Return the address (host:port) of the cluster's Ray instance, as recorded."""
        return str(json.loads(self.record.read_text())["ray_address"])

    @property
    def stdout(self) -> str:
        """Return everything that the process has written to standard output."""
        return (self.cache / _STDOUT).read_text()

    @property
    def stderr(self) -> str:
        """Return everything that the process has written to standard error."""
        return (self.cache / _STDERR).read_text()

    def interrupt(self) -> None:
        """Send SIGINT as a terminal does at Ctrl-C: to the command and to all processes that it has started."""
        os.killpg(self.process.pid, signal.SIGINT)

    def command(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run another command of the same user."""
        return run_baton(self.cache, *arguments, host=self.host)


def run_baton(
    cache: Path, *arguments: str, environment: Mapping[str, str] = NO_VARIABLES, host: Host = MACHINE
) -> "subprocess.CompletedProcess[str]":
    """Run one `baton` command to its end, with additional environment variables."""
    command = host.command(sys.executable, "-m", "deploy.cli", *arguments)
    variables = {**_environment(cache), **environment}
    return subprocess.run(command, cwd=ROOT, env=variables, text=True, capture_output=True, timeout=300)


@contextlib.contextmanager
def served(
    cache: Path,
    model: Path,
    *assignments: str,
    address: str = "",
    environment: Mapping[str, str] = NO_VARIABLES,
    host: Host = MACHINE,
    is_arranged: bool = False,
) -> Iterator[ServedCluster]:
    """Run a cluster, and yield it once it serves. It joins the Ray instance at `address` (host:port); an empty address
    starts a new Ray instance. It is launched on `host` with additional environment variables. At the end, it is
    interrupted unless it has ended already. `is_arranged`: the cluster decides from measurements how to arrange the
    pools."""
    with launched(
        cache, model, *assignments, address=address, environment=environment, host=host, is_arranged=is_arranged
    ) as starting:
        yield ready(starting)


def ready(starting: ServedCluster) -> ServedCluster:
    """Wait until the cluster serves, and return it with `target` and `ray_folder`."""
    until(lambda: starting.process.poll() is not None or "\nready: " in starting.stderr, START_S)
    found = re.search(r"^ready: clients may connect to (\S+);", starting.stderr, re.MULTILINE)
    assert found, f"not ready: {starting.stderr}"
    return replace(starting, target=found[1], ray_folder=recorded_folder(starting.cache))


@contextlib.contextmanager
def launched(
    cache: Path,
    model: Path,
    *assignments: str,
    address: str = "",
    environment: Mapping[str, str] = NO_VARIABLES,
    host: Host = MACHINE,
    is_arranged: bool = False,
) -> Iterator[ServedCluster]:
    """Like `served`, but yield the cluster as soon as the command has started."""
    settings = [f"model.name={model}", "model.dtype=float32", "orchestrator.port=0", "http.port=-1"]
    if not is_arranged:  # measurements on a busy machine must not decide which workers prefill
        settings += ["generate.num_threads=1", "orchestrator.disaggregation=always"]
    options = [part for each in (*settings, *assignments) for part in ("--set", each)]
    if address:
        options += ["--address", address]
    command = host.command(sys.executable, "-m", "deploy.cli", "serve", *options)
    variables = {**_environment(cache), **environment}
    with (cache / _STDOUT).open("w") as stdout, (cache / _STDERR).open("w") as stderr:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, text=True, stdout=stdout, stderr=stderr, start_new_session=True
        )
    try:
        yield ServedCluster(process, cache, target="", ray_folder="", model=model, host=host)
    finally:
        if process.poll() is None:
            os.kill(host.inner(process.pid), signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        if process.poll() is None:
            process.kill()
            process.wait()


def recorded_folder(cache: Path) -> str:
    """Return the folder of the Ray instance that was started for the cluster; empty if the cluster joined an existing
    one."""
    record = json.loads((cache / "baton" / "clusters" / "baton.json").read_text())
    return str(record["ray_folder"])


def shared_files(cache: Path) -> list[Path]:
    """Return the files in this machine's shared memory that belong to workers of the clusters recorded in `cache`."""
    of_cache = store_name(cache / "baton" / "clusters" / "any.json").removeprefix("any")
    return [path for path in node_folder("").parent.iterdir() if path.name.endswith(of_cache)]


def listener(endpoint: str, host: Host = MACHINE) -> int:
    """Return the id of the process that listens on `endpoint` (host:port) on this machine or a simulated host."""
    port = f":{int(endpoint.rpartition(':')[2]):04X}"
    for table in ("tcp", "tcp6"):
        for line in (Path("/proc") / str(host.init_pid or "self") / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1].endswith(port) and fields[3] == "0A":
                return _owner(f"socket:[{fields[9]}]")
    raise AssertionError(f"nobody listens on {endpoint}")


def supervisors(ray_folder: str) -> set[int]:
    """Return the process ids of the supervisor's actor. Usually there is exactly one. During a restart, there may be
    none, or both the ending process and its successor."""
    return {pid for pid, command in processes_of(ray_folder).items() if "SupervisorActor" in command}


def supervisor(ray_folder: str) -> int:
    """Return the process id of the supervisor's actor."""
    (found,) = supervisors(ray_folder)
    return found


def endpoints(state: ClusterState, role: str) -> tuple[str, ...]:
    """Return the addresses of the workers of the first group with the given role."""
    return next(group.endpoints for group in state.groups if group.role == role)


def secret_of(cache: Path) -> ClusterSecret:
    """Return the secret of the cluster that is recorded in `cache`."""
    return load_secret(cache / "baton" / "clusters" / "baton.json")


def num_jobs(endpoint: str, secret: ClusterSecret) -> int:
    """Return the number of jobs that the prefill rank at `endpoint` (host:port) holds."""
    with keyed(grpc.insecure_channel(endpoint, options=channel_options(Keepalive())), None, secret) as channel:
        return int(PrefillRankStub(channel).GetStatus(PrefillStatusRequest(), timeout=10).num_jobs)


def processes_of(ray_folder: str) -> dict[int, str]:
    """Return the command lines, by process id, of all processes that have a file of this Ray instance open."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(str(file.readlink()).startswith(f"{ray_folder}/") for file in (process / "fd").iterdir()):
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return {pid: command for pid, command in found.items() if process_start(pid)}


ANSWER = SamplingParams(max_tokens=200, ignore_eos=True)
decoder_of = functools.cache(functools.partial(load_decoder, dtype="float32"))
"""Load the reference decoder of a model folder. Results are cached."""


def check_answer(running: ServedCluster, prompt_ids: Sequence[int], answer: Completion, params: SamplingParams) -> None:
    """Check that the answer is complete and equals the reference model's answer."""
    tokens = [token.token_id for token in answer.tokens]
    assert len(tokens) == params.max_tokens
    check_equal_tokens(decoder_of(running.model), prompt_ids, tokens, params)


class Streams:
    """Context manager that streams answers to some prompts repeatedly, until `check` is called."""

    def __init__(
        self, running: ServedCluster, client: Client, num_prompts: int = 4, params: SamplingParams = ANSWER
    ) -> None:
        self._client = client
        self._model = running.model
        self._params = params
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(num_prompts)
        prompts = [prompt(20 + 9 * index) for index in range(num_prompts)]
        self._asking = {each: self._pool.submit(self._ask, each) for each in prompts}

    def __enter__(self) -> "Streams":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._pool.shutdown()

    def check(self) -> None:
        """Check that every stream has received each of its tokens exactly once."""
        self._over.set()
        for prompt_ids, asking in self._asking.items():
            answers = asking.result()
            assert answers
            for tokens in set(answers):
                assert len(tokens) == self._params.max_tokens
                check_equal_tokens(decoder_of(self._model), prompt_ids, tokens, self._params)

    def _ask(self, prompt_ids: tuple[int, ...]) -> list[tuple[int, ...]]:
        answers = []
        while not self._over.is_set():
            answer = self._client.generate(token_ids=prompt_ids, params=self._params).collect()
            answers.append(tuple(token.token_id for token in answer.tokens))
        return answers


def until(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    """Wait until `holds()` returns True. Fails after `within_s` seconds. One call of `holds` counts for at most 0.5 s,
    because the limit applies to the cluster, not to slow calls on a busy machine."""
    pause, spent_s, looked_s = threading.Event(), 0.0, time.monotonic()
    while not holds():
        assert spent_s < within_s, f"did not come true within {within_s:g} s"
        pause.wait(0.1)
        now_s = time.monotonic()
        spent_s, looked_s = spent_s + min(now_s - looked_s, 0.5), now_s


def until_settled(cluster: ServedCluster, client: Client, within_s: float = 60.0) -> None:
    """Wait until all groups are ready, no request waits or runs, and no slot, byte or job is held or leaked."""
    until(lambda: _is_settled(cluster, client), within_s)
    assert [group.num_leaked for group in client.cluster_state().groups if group.num_leaked] == []


def _is_settled(cluster: ServedCluster, client: Client) -> bool:
    try:
        state = client.cluster_state()
    except BatonError:
        return False  # the orchestrator does not run yet
    groups = state.groups
    statuses = [group.generation for group in groups if group.role == "generate"]
    held = [status is None or status.num_slots - status.num_free + status.num_bytes_held for status in statuses]
    held += [group.num_requests for group in groups]
    if not all(group.is_ready for group in groups) or any((state.num_queued, state.num_running, *held)):
        return False
    if any(each.endswith(" starts") or " did not start" in each for each in state.why_degraded):
        return False  # a restarted supervisor has not found all workers yet
    secret, ranks = secret_of(cluster.cache), [group.endpoints for group in groups if group.role == "prefill"]
    try:
        return not any(num_jobs(each, secret) for endpoints_of_group in ranks for each in endpoints_of_group)
    except grpc.RpcError:
        return False  # one of the workers has ended meanwhile


def _owner(socket: str) -> int:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(str(file.readlink()) == socket for file in (process / "fd").iterdir()):
                return int(process.name)
    raise AssertionError(f"nobody has {socket} open")


def share_measurements(cache: Path) -> None:
    """Copy this user's measurements of kernels and cores into a new cache folder, so that they are measured only once
    for all tests."""
    own, shared = cache / "baton" / "kernels", cache_folder() / "kernels"
    own.parent.mkdir(exist_ok=True)
    shared.mkdir(parents=True, exist_ok=True)
    if not own.exists():
        own.symlink_to(shared)


def _environment(cache: Path) -> dict[str, str]:
    share_measurements(cache)
    settings = {"XDG_CACHE_HOME": str(cache), "HOME": str(cache), "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    return os.environ | settings
