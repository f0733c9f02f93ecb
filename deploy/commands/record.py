"""Records on disk of clusters that were brought up on this machine: enough to show a cluster and to end it.

One JSON file for each cluster in the user's cache folder, written by `baton serve` and removed when the cluster is
gone. The launcher owns it; `baton status` and `baton stop` read it, and `baton stop` removes what a killed launcher
left.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.errors import ConfigError, UnavailableError
from baton.modeling.prefix_store.folder import node_folder, remove_left, sweep
from baton.settings.paths import cache_folder
from baton.transport.identity import ClusterSecret
from deploy.commands.cluster_secrets import load_secret, remove_secrets, token_path
from deploy.config.environment import SECRET_VARIABLE, read_variable

_POLL_S = 0.05
_OF_RAY = re.compile(rb"ray::|([^\0]*\0(-[^\0]*\0)*)?[^\0]*/(site|dist)-packages/ray/")
"""Command line of a process of Ray's: a worker's title, or a program or script of the package."""


@dataclass(frozen=True)
class ClusterRecord:
    """The record of one cluster."""

    name: str
    launcher_pid: int
    launcher_started: str
    """Start time of the launcher in the kernel's ticks since boot. It identifies a process that reuses the launcher's
    process id."""
    ray_address: str
    """Address of the cluster's Ray, host:port."""
    ray_folder: str
    """Temporary folder of a Ray that the launcher started; empty when it joined a running one."""
    endpoint: str = ""
    """Address of the orchestrator, host:port; empty until it serves."""
    http: str = ""
    """URL of OpenAI's API; empty until the orchestrator serves, and where none is served."""

    @property
    def launcher_lives(self) -> bool:
        return process_start(self.launcher_pid) == self.launcher_started

    def save(self) -> None:
        """Write the record to its file. An existing file is replaced atomically."""
        path = record_path(self.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(path)

    def remove(self) -> None:
        """Remove the record, the cluster's secrets, its Ray's folder, and prefixes that killed workers left, waiting a
        while for workers that are about to end. Harmless when they are gone."""
        if self.ray_folder:
            shutil.rmtree(self.ray_folder, ignore_errors=True)
        remove_secrets(record_path(self.name))
        remove_left(node_folder(store_name(record_path(self.name))))
        sweep()
        record_path(self.name).unlink(missing_ok=True)


def record_path(name: str) -> Path:
    """Return the path of the record of the cluster of that name."""
    return cache_folder() / "clusters" / f"{name}.json"


def store_name(record: Path) -> str:
    """Return the name by which the workers of a cluster share files on a node: the cluster's name, and a hash of the
    folder of its record. Clusters of one name may run at the same time if their records are in different folders."""
    place = hashlib.blake2b(str(record.parent.absolute()).encode(), digest_size=4).hexdigest()
    return f"{record.stem}-{place}"


def load_record(name: str) -> ClusterRecord | None:
    """Read the record of the cluster of that name; None when there is none. Raises ConfigError for a damaged file."""
    path = record_path(name)
    try:
        return ClusterRecord(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error}): remove it") from error


def serving_endpoint(name: str) -> str:
    """Return host:port of the orchestrator of the cluster of that name on this machine. Raises ConfigError when there
    is none, UnavailableError while it starts."""
    record = load_record(name)
    if record is None:
        raise ConfigError(f"cluster {name} is not running here: start it with `baton serve`, or give --target")
    if not record.endpoint:
        raise UnavailableError(f"cluster {name} is starting: try again when `baton status {name}` shows its groups")
    return record.endpoint


def secret_for(target: str | None, name: str) -> ClusterSecret:
    """Return the secret to send to a cluster: the one in BATON_CLUSTER_SECRET for a target, else the one kept for the
    cluster of this name on this machine. Raises ConfigError when there is none.

    The server at a target may be another user's, so it is never sent the secret of a cluster on this machine.
    """
    return load_secret(record_path(name)) if target is None else ClusterSecret(read_variable(SECRET_VARIABLE))


def process_start(pid: int) -> str:
    """Return when a process started, in the kernel's ticks since boot; empty when it does not exist, or is a zombie."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] != "Z" else ""


def kill_ray(folder: str, within_s: float = 10.0) -> int:
    """Kill the processes that remain of the Ray in that folder, wait until they are gone, and return how many there
    were. Raises UnavailableError for processes that do not end within `within_s` seconds."""
    killed: set[int] = set()
    deadline, pause = time.monotonic() + within_s, threading.Event()
    while doomed := _processes_of(folder):
        if time.monotonic() > deadline:
            raise UnavailableError(f"processes {sorted(doomed)} do not end: kill them, then stop the cluster again")
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= doomed
        pause.wait(_POLL_S)
    return len(killed)


def ray_token_of(address: str) -> Path | None:
    """Return the file with the token of the Ray at host:port, if a cluster that is recorded here started that Ray; else
    None."""
    for path in record_path("any").parent.glob("*.json"):
        with contextlib.suppress(ConfigError):  # a damaged record is reported to those who name its cluster
            record = load_record(path.stem)
            if record is not None and record.ray_folder and record.ray_address == address:
                return token_path(path)
    return None


def _processes_of(folder: str) -> set[int]:
    """Return the living processes of that Ray and their descendants, this process excluded."""
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    parents = {pid: int(fields[1]) for pid in pids if (fields := _stat(pid)) and fields[0] != "Z"}
    found = {pid for pid in parents if _is_of(pid, folder)}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def _is_of(pid: int, folder: str) -> bool:
    """Return whether the process is one of Ray's and belongs to the Ray in that folder. Ray's servers have the folder
    in their command line; workers, which rename themselves, have files in it open: their logs."""
    process = Path("/proc") / str(pid)
    with contextlib.suppress(OSError):
        command = (process / "cmdline").read_bytes()
        if not _OF_RAY.match(command):
            return False
        if f"{folder}/".encode() in command:
            return True
        return any(str(file.readlink()).startswith(f"{folder}/") for file in (process / "fd").iterdir())
    return False


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name; empty when there is no such process."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
