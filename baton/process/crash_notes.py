"""Crash notes: files that remain after a worker's process has crashed. They hold the requests that the process was
computing, and the trace of the crash.

The process creates a note when it starts. For each step, its engine writes the requests that the step computes into the
note (`ComputedNow`). Python's faulthandler appends a trace when a signal such as SIGSEGV or SIGABRT ends the process.
Nothing is appended when the process is killed. Once the process has ended, its supervisor reads the note
(`read_crash`).

A note is a file in a memory file system. Its head holds the fingerprints of the requests and is mapped by the engine;
the trace follows the head. The process holds a lock on its note. A later process removes notes that have no lock and
that no supervisor has read.
"""

import contextlib
import faulthandler
import fcntl
import hashlib
import logging
import mmap
import os
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

NUM_WATCHED_TOKENS = 4
"""Number of tokens during which a request is recorded in the note. A request that crashes its worker after them is not
recognised."""
_MEMORY = Path("/dev/shm")
NOTE_PREFIX = "baton-crash-note"
_HEAD_BYTES = mmap.PAGESIZE
_LENGTH_BYTES = 8
_NAME_BYTES = 8
_MAX_NAMES = (_HEAD_BYTES - _LENGTH_BYTES) // _NAME_BYTES
_UNREAD_S = 60.0
"""Seconds for which a crash note is kept for the supervisor before another process may remove it."""


@dataclass(frozen=True)
class Crash:
    """Crash of a worker's process."""

    trace: str
    """Trace of the thread that crashed, in several lines."""
    computing: tuple[str, ...]
    """Hexadecimal fingerprints of the recorded requests that were being computed."""


def fingerprint(request_id: str, prompt_ids: Sequence[int]) -> bytes:
    """Return the fingerprint of a request. It is equal for all attempts of the request, and for its choices that are
    retried one by one under the id ID/NUMBER."""
    name, _, choice = request_id.rpartition("/")
    made = hashlib.blake2b(digest_size=_NAME_BYTES)
    made.update((name if choice.isdigit() else request_id).encode() + b"\0")
    made.update(array("I", prompt_ids))
    return made.digest()


def begin_note(folder: Path = _MEMORY) -> str:
    """Create the crash note of this process, and enable appending the trace of a crash to it. Return its path; empty
    when it cannot be created, which is logged. Call once in a process."""
    _sweep(folder)
    try:
        file, path = tempfile.mkstemp(prefix=f"{NOTE_PREFIX}-{os.geteuid()}-", dir=folder)
        os.ftruncate(file, _HEAD_BYTES)
        os.lseek(file, 0, os.SEEK_END)
        fcntl.flock(file, fcntl.LOCK_EX)  # until the process ends: it never closes the file
    except OSError as error:
        logger.warning("requests that crash this worker will not be recognised: no crash note (%s)", error)
        return ""
    faulthandler.enable(file, all_threads=False)
    return path


def end_note(path: str) -> None:
    """Remove the note of a process that ends normally. Does nothing when the note does not exist."""
    if path:
        Path(path).unlink(missing_ok=True)


def read_crash(path: str) -> Crash | None:
    """Return the crash of the process that wrote the note, and remove the note. Return None when the process did not
    crash, or its note cannot be read. Call once after the process has ended."""
    try:
        content = Path(path).read_bytes() if path else b""
        end_note(path)
    except OSError:
        return None
    head, trace = content[:_HEAD_BYTES], content[_HEAD_BYTES:].decode(errors="replace")
    if not trace:
        return None
    end = _LENGTH_BYTES + int.from_bytes(head[:_LENGTH_BYTES], "little")
    names = {head[at : at + _NAME_BYTES].hex() for at in range(_LENGTH_BYTES, end, _NAME_BYTES)}
    return Crash(trace, tuple(sorted(names)))


class ComputedNow:
    """The requests that an engine is computing now, written to the crash note. Used by the engine's thread."""

    def __init__(self, path: str = "") -> None:
        """Map the head of the note at `path`. An empty path means that the engine has no note."""
        self._names: tuple[bytes, ...] = ()
        if not path:
            self._head = mmap.mmap(-1, _HEAD_BYTES)
            return
        with Path(path).open("r+b") as file:
            self._head = mmap.mmap(file.fileno(), _HEAD_BYTES)

    def set(self, names: tuple[bytes, ...]) -> None:
        """Replace the recorded fingerprints by `names`, those of the requests that are computed from now on."""
        if names == self._names:
            return
        self._names = names
        content = b"".join(names[:_MAX_NAMES])
        self._head[: _LENGTH_BYTES + len(content)] = len(content).to_bytes(_LENGTH_BYTES, "little") + content


def _sweep(folder: Path) -> None:
    """Remove this user's notes whose process has ended and whose supervisor has not read them."""
    for path in folder.glob(f"{NOTE_PREFIX}-{os.geteuid()}-*"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its process still runs
            if time.time() - path.stat().st_mtime > _UNREAD_S:
                path.unlink()
