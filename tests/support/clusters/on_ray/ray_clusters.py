"""Clusters on Ray for tests: brought up by the command that users type, and found again by the ports they listen on."""

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
    """A running `baton serve`; `target` and `ray_folder` once it serves."""

    process: "subprocess.Popen[str]"
    cache: Path
    """XDG_CACHE_HOME of its commands."""
    target: str
    """host:port of its orchestrator."""
    ray_folder: str
    """Empty when it joined a Ray."""
    model: Path
    """Folder of the model that it serves."""
    host: Host = MACHINE
    """Where it was launched, and where further commands run."""

    @property
    def record(self) -> Path:
        """The file in which commands of its user find it."""
        return self.cache / "baton" / "clusters" / "baton.json"

    @property
    def ray_address(self) -> str:
        """host:port of its Ray, as recorded."""
        return str(json.loads(self.record.read_text())["ray_address"])

    @property
    def stdout(self) -> str:
        """All that it has written there."""
        return (self.cache / _STDOUT).read_text()

    @property
    def stderr(self) -> str:
        """As `stdout`."""
        return (self.cache / _STDERR).read_text()

    def interrupt(self) -> None:
        """Ctrl-C, as a terminal sends it: to all processes that the command has started as well."""
        os.killpg(self.process.pid, signal.SIGINT)

    def command(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Runs another command of the same user."""
        return run_baton(self.cache, *arguments, host=self.host)


def run_baton(
    cache: Path, *arguments: str, environment: Mapping[str, str] = NO_VARIABLES, host: Host = MACHINE
) -> "subprocess.CompletedProcess[str]":
    """One `baton` command to its end, with further environment variables."""
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
    """A cluster that serves, on a Ray of its own or that at host:port, launched on `host` with further environment
    variables; interrupted at the end, unless it has ended. `is_arranged`: the machine decides how the pools are."""
    with launched(
        cache, model, *assignments, address=address, environment=environment, host=host, is_arranged=is_arranged
    ) as starting:
        yield ready(starting)


def ready(starting: ServedCluster) -> ServedCluster:
    """Waits until it serves."""
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
    """As `served`, from the command's first moment."""
    settings = [f"model.name={model}", "model.dtype=float32", "orchestrator.port=0", "http.port=-1"]
    if not is_arranged:  # a crowded machine must not decide who prefills
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
    """Of the Ray that was started for the cluster; empty when it joined one."""
    record = json.loads((cache / "baton" / "clusters" / "baton.json").read_text())
    return str(record["ray_folder"])


def shared_files(cache: Path) -> list[Path]:
    """What the workers of clusters that are recorded in that cache share in this machine's memory."""
    of_cache = store_name(cache / "baton" / "clusters" / "any.json").removeprefix("any")
    return [path for path in node_folder("").parent.iterdir() if path.name.endswith(of_cache)]


def listener(endpoint: str, host: Host = MACHINE) -> int:
    """The process that listens on host:port, on this machine or a host of it."""
    port = f":{int(endpoint.rpartition(':')[2]):04X}"
    for table in ("tcp", "tcp6"):
        for line in (Path("/proc") / str(host.init_pid or "self") / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1].endswith(port) and fields[3] == "0A":
                return _owner(f"socket:[{fields[9]}]")
    raise AssertionError(f"nobody listens on {endpoint}")


def supervisors(ray_folder: str) -> set[int]:
    """The processes of the supervisor's actor: one, or for a moment none, or a dying one and the next."""
    return {pid for pid, command in processes_of(ray_folder).items() if "SupervisorActor" in command}


def supervisor(ray_folder: str) -> int:
    """The process of the supervisor's actor."""
    (found,) = supervisors(ray_folder)
    return found


def endpoints(state: ClusterState, role: str) -> tuple[str, ...]:
    """Of the first group of that role."""
    return next(group.endpoints for group in state.groups if group.role == role)


def secret_of(cache: Path) -> ClusterSecret:
    """The secret of the cluster that is recorded in that cache."""
    return load_secret(cache / "baton" / "clusters" / "baton.json")


def num_jobs(endpoint: str, secret: ClusterSecret) -> int:
    """Jobs that the prefill rank at host:port holds."""
    with keyed(grpc.insecure_channel(endpoint, options=channel_options(Keepalive())), None, secret) as channel:
        return int(PrefillRankStub(channel).GetStatus(PrefillStatusRequest(), timeout=10).num_jobs)


def processes_of(ray_folder: str) -> dict[int, str]:
    """All that has a file of that Ray open, by process id: command lines."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(str(file.readlink()).startswith(f"{ray_folder}/") for file in (process / "fd").iterdir()):
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return {pid: command for pid, command in found.items() if process_start(pid)}


ANSWER = SamplingParams(max_tokens=200, ignore_eos=True)
decoder_of = functools.cache(functools.partial(load_decoder, dtype="float32"))
"""The reference for a model's folder."""


def check_answer(running: ServedCluster, prompt_ids: Sequence[int], answer: Completion, params: SamplingParams) -> None:
    """The answer is whole, and the model's."""
    tokens = [token.token_id for token in answer.tokens]
    assert len(tokens) == params.max_tokens
    check_equal_tokens(decoder_of(running.model), prompt_ids, tokens, params)


class Streams:
    """Streams of some prompts, again and again, until `check`; a context manager."""

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
        """All that ran have brought what they should: every token, and none twice."""
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
    """Waits until it holds; fails after so many seconds, of which one look counts for half a second at most: it is the
    cluster that is timed, and not how long a crowded machine takes to look."""
    pause, spent_s, looked_s = threading.Event(), 0.0, time.monotonic()
    while not holds():
        assert spent_s < within_s, f"did not come true within {within_s:g} s"
        pause.wait(0.1)
        now_s = time.monotonic()
        spent_s, looked_s = spent_s + min(now_s - looked_s, 0.5), now_s


def until_settled(cluster: ServedCluster, client: Client, within_s: float = 60.0) -> None:
    """All groups are ready, and nobody waits, runs or holds a slot, a byte or a job; nothing is leaked."""
    until(lambda: _is_settled(cluster, client), within_s)
    assert [group.num_leaked for group in client.cluster_state().groups if group.num_leaked] == []


def _is_settled(cluster: ServedCluster, client: Client) -> bool:
    try:
        state = client.cluster_state()
    except BatonError:
        return False  # no orchestrator yet
    groups = state.groups
    statuses = [group.generation for group in groups if group.role == "generate"]
    held = [status is None or status.num_slots - status.num_free + status.num_bytes_held for status in statuses]
    held += [group.num_requests for group in groups]
    if not all(group.is_ready for group in groups) or any((state.num_queued, state.num_running, *held)):
        return False
    if any(each.endswith(" starts") or " did not start" in each for each in state.why_degraded):
        return False  # a new incarnation of the supervisor has not found them all yet
    secret, ranks = secret_of(cluster.cache), [group.endpoints for group in groups if group.role == "prefill"]
    try:
        return not any(num_jobs(each, secret) for endpoints_of_group in ranks for each in endpoints_of_group)
    except grpc.RpcError:
        return False  # one of them has ended meanwhile


def _owner(socket: str) -> int:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(str(file.readlink()) == socket for file in (process / "fd").iterdir()):
                return int(process.name)
    raise AssertionError(f"nobody has {socket} open")


def share_measurements(cache: Path) -> None:
    """Gives a cache folder of its own what this user measured of kernels and cores: that is done once for all tests."""
    own, shared = cache / "baton" / "kernels", cache_folder() / "kernels"
    own.parent.mkdir(exist_ok=True)
    shared.mkdir(parents=True, exist_ok=True)
    if not own.exists():
        own.symlink_to(shared)


def _environment(cache: Path) -> dict[str, str]:
    share_measurements(cache)
    settings = {"XDG_CACHE_HOME": str(cache), "HOME": str(cache), "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    return os.environ | settings
