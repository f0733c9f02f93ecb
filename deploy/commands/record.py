"""What is on disk of a cluster that was brought up from this machine: enough to show it and to end it.

One JSON file for each cluster in the user's cache folder, written by `baton serve`, removed when all is gone. Its owner
is the launcher; `baton status` and `baton stop` read it, and `baton stop` removes what a killed launcher left.
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from baton.errors import ConfigError, UnavailableError
from baton.paths import cache_folder
from modeling.prefix_store.folder import sweep

_POLL_S = 0.05
_CONNECT_S = 5.0


@dataclass(frozen=True)
class ClusterRecord:
    """One cluster."""

    name: str
    launcher_pid: int
    launcher_started: str
    """When, as the kernel counts: a reused process id is another launcher."""
    ray_address: str
    """host:port of its Ray."""
    ray_folder: str
    """Temporary folder of a Ray that the launcher started; empty when it joined one."""
    endpoint: str = ""
    """host:port of the orchestrator, once it serves."""

    @property
    def launcher_lives(self) -> bool:
        return process_start(self.launcher_pid) == self.launcher_started

    def save(self) -> None:
        """Replaces the file as a whole."""
        path = record_path(self.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(path)

    def serving(self, endpoint: str) -> "ClusterRecord":
        """The same, serving there."""
        return replace(self, endpoint=endpoint)

    def remove(self) -> None:
        """Forgets the cluster, removes its Ray's folder, and prefixes that killed workers left on this machine.
        Harmless when they are gone."""
        if self.ray_folder:
            shutil.rmtree(self.ray_folder, ignore_errors=True)
        sweep()
        record_path(self.name).unlink(missing_ok=True)


def record_path(name: str) -> Path:
    """Where the cluster of that name is recorded."""
    return cache_folder() / "clusters" / f"{name}.json"


def store_name(record: Path) -> str:
    """Return the name by which the workers of a cluster share files on a node: the cluster's, and a hash of the folder
    of its record, for clusters of one name that are recorded in different folders may run at once."""
    place = hashlib.blake2b(str(record.parent.absolute()).encode(), digest_size=4).hexdigest()
    return f"{record.stem}-{place}"


def load_record(name: str) -> ClusterRecord | None:
    """The cluster of that name; None when none is recorded. Raises ConfigError for a damaged file."""
    path = record_path(name)
    try:
        return ClusterRecord(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error}): remove it") from error


def serving_endpoint(name: str) -> str:
    """host:port of the orchestrator of the cluster of that name, which was brought up on this machine. Raises
    ConfigError when there is none, UnavailableError while it starts."""
    record = load_record(name)
    if record is None:
        raise ConfigError(f"cluster {name} is not running here: start it with `baton serve`, or give --target")
    if not record.endpoint:
        raise UnavailableError(f"cluster {name} is starting: try again when `baton status {name}` shows its groups")
    return record.endpoint


def process_start(pid: int) -> str:
    """When that process started, in the kernel's ticks since boot; empty when there is none, or it is a zombie."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] != "Z" else ""


def kill_ray(folder: str, within_s: float = 10.0) -> int:
    """Kills what is left of the Ray whose temporary folder that is, with its workers, and waits until it is gone;
    returns how many processes there were. Raises UnavailableError for what does not end within `within_s` seconds."""
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


def require_reachable(address: str) -> None:
    """Raises UnavailableError when nobody listens on host:port; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise UnavailableError(f"Ray at {address} cannot be reached ({error}): check ray.address, host:port") from error


def _processes_of(folder: str) -> set[int]:
    """Living processes of that Ray, and their descendants; never this one."""
    parents = {pid: int(fields[1]) for pid in _pids() if (fields := _stat(pid)) and fields[0] != "Z"}
    found = {pid for pid in parents if _is_of(pid, folder)}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def _pids() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").glob("[0-9]*"))


def _is_of(pid: int, folder: str) -> bool:
    """The folder is in its command line (Ray's own processes), or has a file that it holds open (workers, which rename
    themselves: their logs)."""
    process = Path("/proc") / str(pid)
    with contextlib.suppress(OSError):
        if f"{folder}/".encode() in (process / "cmdline").read_bytes():
            return True
        return any(str(file.readlink()).startswith(f"{folder}/") for file in (process / "fd").iterdir())
    return False


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name; empty when there is no such process."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
