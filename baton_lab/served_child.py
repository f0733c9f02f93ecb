"""Runs `baton serve` as a child process for a limited time, and ensures that none of its processes remain.

Used by the demo and by benchmarks. The child has its own session, so Ctrl-C at the terminal reaches only the process
that started the child, which then ends the child. Runs on the owner's event loop.
"""

import asyncio
import contextlib
import os
import signal
import sys
import uuid
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from baton.errors import BatonError, ConfigError, UnavailableError
from baton.process.endless import tell_failure
from deploy.commands.record import ClusterRecord, kill_ray, load_record

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_END_S = 90.0
_LAST_LINES_S = 5.0
_CONFIG_STATUS = 2
_PREFIX = "baton: "
_READY = "ready: "


@dataclass(frozen=True)
class OwnCluster:
    """Addresses of a cluster that this process started."""

    name: str
    target: str
    """Address (`host:port`) of the cluster's orchestrator."""
    ray_address: str
    """Address (`host:port`) of the cluster's Ray instance. Another cluster may join it."""


@contextlib.asynccontextmanager
async def own_cluster(purpose: str, options: Sequence[str], report: Callable[[str], None]) -> AsyncIterator[OwnCluster]:
    """Start a cluster with the options of `baton serve` on a free port, and yield its addresses. The cluster's name
    starts with `purpose`. The cluster is shut down at the end of the `async with` block.

    `report` is called with each line that the child prints. Raises ConfigError or UnavailableError, with the reason, if
    the cluster does not start.
    """
    name = f"{purpose}-{os.getpid()}-{uuid.uuid4().hex[:4]}"
    fixed = ("--set", f"name={name}", "--set", "orchestrator.port=0", "--set", "http.port=-1")
    command = (sys.executable, "-m", "deploy.cli", "serve", *options, *fixed)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, start_new_session=True
    )
    child = _Child(process, name, report)
    try:
        record = await child.ready()
        yield OwnCluster(name, record.endpoint, record.ray_address)
    finally:
        await _to_the_end(child.end())


async def until_signal(work: Coroutine[Any, Any, int]) -> int:
    """Run `work` and return its result. The first termination signal to this process cancels `work`; the result is then
    128 plus the signal's number. Further signals are ignored."""
    task = asyncio.create_task(work)
    caught: list[int] = []

    def catch(number: int) -> None:
        if not caught:
            task.cancel()
        caught.append(number)

    for each in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(each, catch, each)
    await asyncio.wait({task})
    return 128 + caught[0] if caught and task.cancelled() else task.result()


class _Child:
    """Child process that runs `baton serve`, and the record that describes its cluster."""

    def __init__(self, process: Process, name: str, report: Callable[[str], None]) -> None:
        self._process = process
        self._name = name
        self._report = report
        self._record: ClusterRecord | None = None
        self._serves = asyncio.Event()
        self._last_line = ""
        self._following = asyncio.create_task(self._follow())

    async def ready(self) -> ClusterRecord:
        """Wait until clients can connect, and return the record of the cluster. If the child ends earlier, raise the
        error that it reported."""
        serving = asyncio.create_task(self._serves.wait())
        try:
            await asyncio.wait((serving, self._following), return_when=asyncio.FIRST_COMPLETED)
        finally:
            serving.cancel()
        if not self._serves.is_set():
            await self._following  # raises the error of the reader, if any
            raise self._failure(await self._process.wait())
        assert self._record is not None
        return self._record

    async def end(self) -> None:
        """End the child and all processes that it started. This includes processes that remain from an interrupted
        start."""
        self._report = lambda line: None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        try:
            await asyncio.wait_for(self._process.wait(), _END_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await asyncio.wait({self._following}, timeout=_LAST_LINES_S)  # a remaining process may hold the pipe open
        if self._record is not None:
            if self._record.ray_folder:
                await asyncio.to_thread(kill_ray, self._record.ray_folder)
            self._record.remove()
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)

    async def _follow(self) -> None:
        """Read the child's lines to the end, because the child would block on a full pipe. An exception while a line is
        processed is raised if the cluster is still starting; later, it is logged."""
        while line := await self._next_line():
            try:
                self._take(line.decode(errors="replace").strip() or self._last_line)
            except Exception as error:
                if not self._serves.is_set():
                    raise
                tell_failure(f"a line of cluster {self._name} is lost", error)

    async def _next_line(self) -> bytes:
        """Return the next line, or a note instead of a line that exceeds asyncio's limit; empty at the end of the
        output."""
        assert self._process.stderr is not None
        try:
            return await self._process.stderr.readline()
        except ValueError:
            return b"a line that was too long\n"

    def _take(self, line: str) -> None:
        """Pass a line to `report`. The cluster's record is loaded first, so that it is never older than the line."""
        self._last_line = line
        self._report(line)
        self._record = load_record(self._name) or self._record
        if line.startswith(_READY):
            self._serves.set()

    def _failure(self, status: int) -> BatonError:
        reason = self._last_line.removeprefix(_PREFIX) or f"`baton serve` ended with status {status}"
        return ConfigError(reason) if status == _CONFIG_STATUS else UnavailableError(reason)


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await work that must complete. A cancellation in the meantime is raised after the work is done."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
