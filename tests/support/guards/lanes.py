"""Lanes (groups) of test files by the resources that their tests need, and a guard that prevents `unit` tests from
starting servers and processes.

docs/testing.md explains the lanes. A file without the marker of another lane belongs to `unit`.
"""

import functools
import os
import re
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import grpc.aio

LANES = ("unit", "integration", "cluster")
_MARKER = re.compile(r"^pytestmark = [^=]*?\bpytest\.mark\.(integration|cluster)\b", re.MULTILINE)
_PROCESS_EVENTS = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty")
_ALLOWED = ("fc-list",)
"""Programs that a unit test may start. matplotlib runs fc-list once to list the fonts."""


@functools.cache
def lane_of(file: Path) -> str:
    """Return the lane of a test file. The file is read as text and not imported, so that a run of one lane does not
    import the files of others."""
    found = _MARKER.search(file.read_text())
    return found[1] if found else "unit"


class Starts:
    """Recorder of the processes and servers that this process starts. There is one per process."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._found: list[str] = []

    def watch(self) -> None:
        """Start recording. The interpreter's audit hook cannot be removed afterwards."""
        sys.addaudithook(self._hear)
        for server in grpc.aio.Server.__subclasses__():
            server.start = self._recorded("a gRPC server", server.start)  # type: ignore[method-assign]
        BaseProcess.start = self._recorded("a process of multiprocessing", BaseProcess.start)  # type: ignore[method-assign]

    def take(self) -> list[str]:
        """Return what was started since the last call."""
        found, self._found = self._found, []
        return found

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if os.getpid() != self._pid:
            return
        if event == "socket.bind" and isinstance(args[1], tuple):
            self._found.append(f"a socket bound to {args[1]}")
        elif event in _PROCESS_EVENTS:
            command = os.fsdecode(args[0]) if args else event
            if Path(command).name not in _ALLOWED:
                self._found.append(f"the process {command}")

    def _recorded(self, name: str, start: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(start)
        def recorded(started: object) -> Any:
            self._found.append(name)
            return start(started)

        return recorded
