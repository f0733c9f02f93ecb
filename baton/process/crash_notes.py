"""Crash notes: files that remain after a worker process has crashed. A note contains the requests that the process was
computing, and the stack trace of the crash.

The process creates its note when it starts. At each step, its engine writes the requests of the step to the note
(`ComputedNow`). If a signal such as SIGSEGV or SIGABRT ends the process, Python's faulthandler appends a stack trace.
No trace is appended if SIGKILL ends it. After the process has ended, its supervisor reads the note (`read_crash`).

A note is a file in a memory file system. The head of the file holds the fingerprints of requests, and is mapped into
the engine's memory. The trace follows the head. The process holds a lock on its note. Notes that are not locked and
that no supervisor has read are removed by processes that start later.
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
"""Number of tokens at the start of each choice. While one of them is computed, the worker's crash note records the
request. If a request crashes its worker at a later token, the crash note does not identify the request."""
_MEMORY = Path("/dev/shm")
NOTE_PREFIX = "baton-crash-note"
_HEAD_BYTES = mmap.PAGESIZE
_LENGTH_BYTES = 8
_NAME_BYTES = 8
_MAX_NAMES = (_HEAD_BYTES - _LENGTH_BYTES) // _NAME_BYTES
_UNREAD_S = 60.0
"""Time in seconds for which the note of a crashed process is kept for its supervisor. After this time, other processes
may remove the note."""


@dataclass(frozen=True)
class Crash:
    """Content of the crash note of a worker process that crashed."""

    trace: str
    """Stack trace of the thread that crashed, in several lines."""
    computing: tuple[str, ...]
    """Fingerprints, in hexadecimal, of the requests that the process was computing, as far as the note recorded
    them."""


def fingerprint(request_id: str, prompt_ids: Sequence[int]) -> bytes:
    """Return the fingerprint by which crash notes identify a request. All attempts of a request have the same
    fingerprint. If one choice is retried as a separate request, the id of that request ends in "/" and the choice's
    number. This ending does not change the fingerprint."""
    name, _, choice = request_id.rpartition("/")
    made = hashlib.blake2b(digest_size=_NAME_BYTES)
    made.update((name if choice.isdigit() else request_id).encode() + b"\0")
    made.update(array("I", prompt_ids))
    return made.digest()


def begin_note(folder: Path = _MEMORY) -> str:
    """Create the crash note of this process, and register it with faulthandler, which appends the stack trace of a
    crash. Return the path of the note. If it cannot be created, log a warning and return an empty string. Call once in
    a process."""
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
    """Remove the note at `path`, because the process ends normally. Does nothing if the note does not exist."""
    if path:
        Path(path).unlink(missing_ok=True)


def read_crash(path: str) -> Crash | None:
    """Read and remove the crash note of a process that has ended. Return None if the process did not crash, or if the
    note cannot be read. Call once."""
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
    """Writes the requests that an engine is currently computing to the process's crash note. Used by the engine's
    thread."""

    def __init__(self, path: str = "") -> None:
        """Map the head of the note at `path` into memory. If `path` is empty, nothing is written to a file."""
        self._names: tuple[bytes, ...] = ()
        if not path:
            self._head = mmap.mmap(-1, _HEAD_BYTES)
            return
        with Path(path).open("r+b") as file:
            self._head = mmap.mmap(file.fileno(), _HEAD_BYTES)

    def set(self, names: tuple[bytes, ...]) -> None:
        """Replace the requests in the note. `names` holds the fingerprints of the requests that are computed from now
        on."""
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
