"""Record files of clusters that were started on this machine. A record contains what is needed to show a cluster's
status and to end it.

Each record is a JSON file in the user's cache folder. It belongs to the launcher: `baton serve` writes it, and removes
it when the cluster has ended. `baton status` and `baton stop` read it. If a launcher was killed, `baton stop` removes
its record and its files.
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
"""Pattern of the command line of a Ray process: the title of a worker, or a program or script in the Ray package."""


@dataclass(frozen=True)
class ClusterRecord:
    """Contents of the record file of one cluster."""

    name: str
    launcher_pid: int
    launcher_started: str
    """Start time of the launcher in the kernel's ticks since boot. It distinguishes the launcher from a later process
    with the same process id."""
    ray_address: str
    """Address (host:port) of the Ray that the cluster runs on."""
    ray_folder: str
    """Temporary folder of the Ray that the launcher started. Empty if the launcher joined a running Ray."""
    endpoint: str = ""
    """Address (host:port) of the orchestrator. Empty until the orchestrator serves."""
    http: str = ""
    """URL of the OpenAI API over HTTP. Empty if HTTP is not configured, or if the orchestrator does not serve yet."""

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
        """Remove the record file, the cluster's secrets, the temporary folder of the Ray that the launcher started, and
        the cached prefixes of workers that were killed. Waits for a limited time for workers that are about to end.
        Files that do not exist are ignored."""
        if self.ray_folder:
            shutil.rmtree(self.ray_folder, ignore_errors=True)
        remove_secrets(record_path(self.name))
        remove_left(node_folder(store_name(record_path(self.name))))
        sweep()
        record_path(self.name).unlink(missing_ok=True)


def record_path(name: str) -> Path:
    """Return the path of the record file of the cluster `name`."""
    return cache_folder() / "clusters" / f"{name}.json"


def store_name(record: Path) -> str:
    """Return the name under which the workers of a cluster share files on a node: the cluster's name and a hash of the
    folder of its record file. Because of the hash, two clusters with the same name can run on one node if their records
    are in different folders."""
    place = hashlib.blake2b(str(record.parent.absolute()).encode(), digest_size=4).hexdigest()
    return f"{record.stem}-{place}"


def load_record(name: str) -> ClusterRecord | None:
    """Return the record of the cluster `name`, or None if it does not exist. Raises ConfigError if the record's file is
    damaged."""
    path = record_path(name)
    try:
        return ClusterRecord(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error}): remove it") from error


def live_clusters() -> list[str]:
    """Return the names of the clusters on this machine whose launcher runs. Raises ConfigError if a record's file is
    damaged."""
    names = sorted(path.stem for path in record_path("any").parent.glob("*.json"))
    return [name for name in names if (record := load_record(name)) is not None and record.launcher_lives]


def serving_endpoint(name: str) -> str:
    """Return the address (host:port) of the orchestrator of the cluster `name` on this machine. Raises ConfigError if
    the cluster does not exist, and UnavailableError while it is starting."""
    record = load_record(name)
    if record is None:
        raise ConfigError(f"cluster {name} is not running here: start it with `baton serve`, or give --target")
    if not record.endpoint:
        raise UnavailableError(f"cluster {name} is starting: try again when `baton status {name}` shows its groups")
    return record.endpoint


def secret_for(target: str | None, name: str) -> ClusterSecret:
    """Return the secret to send to a cluster. If `target` is given, the secret is the value of the variable
    BATON_CLUSTER_SECRET. Otherwise the secret is the one that is stored for the cluster `name` on this machine. Raises
    ConfigError if the secret does not exist.

    The server at `target` may belong to another user. Therefore it never receives the secret of a cluster on this
    machine.
    """
    return load_secret(record_path(name)) if target is None else ClusterSecret(read_variable(SECRET_VARIABLE))


def process_start(pid: int) -> str:
    """Return the start time of a process in the kernel's ticks since boot. Return an empty string if the process does
    not exist or is a zombie."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] != "Z" else ""


def kill_ray(folder: str, within_s: float = 10.0) -> int:
    """Kill the remaining processes of the Ray whose temporary folder is `folder`, wait until they have ended, and
    return their number. Raises UnavailableError if they do not end within `within_s` seconds."""
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
    """Return the path of the file with the authentication token of the Ray at `address` (host:port). Return None if
    that Ray was not started by a cluster that has a record on this machine."""
    for path in record_path("any").parent.glob("*.json"):
        with contextlib.suppress(ConfigError):  # a command that names the cluster reports it
            record = load_record(path.stem)
            if record is not None and record.ray_folder and record.ray_address == address:
                return token_path(path)
    return None


def _processes_of(folder: str) -> set[int]:
    """Return the process ids of the Ray in that folder and of their descendants, without this process."""
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    parents = {pid: int(fields[1]) for pid in pids if (fields := _stat(pid)) and fields[0] != "Z"}
    found = {pid for pid in parents if _is_of(pid, folder)}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def _is_of(pid: int, folder: str) -> bool:
    """Return whether the process belongs to the Ray in that folder. Ray's servers have the folder in their command
    line. Workers change their command line, but have their log files in the folder open."""
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
    """Return the fields of /proc/PID/stat after the process's name; empty if the process does not exist."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
