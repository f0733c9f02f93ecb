"""Workers as child processes: starts them, waits for their end, and kills them.

Parent and child exchange lines of text. The parent writes a WorkerConfig as one line of JSON to the child's standard
input and keeps the pipe open. The child answers with one line of JSON on standard output, `{"port": ...}` or `{"error":
...}`. A further WorkerConfig gives the child another role. The child exits at the end of its input, so no child
outlives a killed parent.

Runs on the parent's asyncio loop.
"""

import asyncio
import contextlib
import json
import signal
import sys
from dataclasses import dataclass
from typing import Any

from baton.errors import BatonError, UnavailableError
from baton.process.crash_notes import Crash, read_crash
from baton.settings.addresses import join_address
from baton.settings.base import to_json
from deploy.config.worker import WorkerConfig

CLOSE_GRACE_S = 5.0
"""Seconds that a worker has to exit by itself before it is killed."""


class WorkerStartError(BatonError):
    """A worker refused to start. The text is the one line of error text that the worker sent."""


@dataclass
class WorkerProcess:
    """A child process that serves as a worker. Implements WorkerHandle."""

    config: WorkerConfig
    endpoint: str
    """Address of the worker's gRPC server, host:port."""
    process: asyncio.subprocess.Process
    start_timeout_s: float
    """Timeout in seconds for the child to start to serve in another role."""
    crash_note: str = ""
    """Path of the file in which the child leaves a note when it crashes; empty if it has none."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None

    async def wait(self) -> str:
        return f"status {await self.process.wait()}"

    async def crash(self) -> Crash | None:
        return read_crash(self.crash_note)

    async def serve_as(self, config: WorkerConfig) -> None:
        """Make the child serve with this configuration. Raises WorkerStartError or UnavailableError; then the process
        has ended."""
        answer = await _served(self.process, config, self.start_timeout_s)
        self.config, self.endpoint = config, join_address(config.place.host, answer["port"])

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process. Does nothing if the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)

    async def close(self) -> None:
        """Close the worker's standard input, which makes the worker exit. Kill it if it still runs after CLOSE_GRACE_S
        seconds. Returns when the process has ended."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            await asyncio.wait_for(self.process.wait(), CLOSE_GRACE_S)
        except TimeoutError:
            self.kill()
            await self.process.wait()


class ProcessSpawner:
    """Makes workers that are children of this process. Implements Spawner.

    `start_timeout_s`: timeout in seconds for a worker to start to serve. `module`: the module that a worker's process
    runs.
    """

    def __init__(self, start_timeout_s: float, module: str = "deploy.groups.worker_process") -> None:
        self._timeout_s = start_timeout_s
        self._module = module

    async def start(self, config: WorkerConfig) -> WorkerProcess:
        """Start a worker's process, by default `python -m deploy.groups.worker_process`, and wait until it serves.
        Raises WorkerStartError or UnavailableError."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", self._module, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        answer = await _served(process, config, self._timeout_s)
        endpoint = join_address(config.place.host, answer["port"])
        return WorkerProcess(config, endpoint, process, self._timeout_s, answer["crash_note"])


async def _served(process: asyncio.subprocess.Process, config: WorkerConfig, timeout_s: float) -> dict[str, Any]:
    """Send the configuration to the process and return its answer once it serves. After a failure the process has
    ended."""
    try:
        return await asyncio.wait_for(_greet(process, config), timeout_s)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if isinstance(error, TimeoutError):
            reason = f"{config.name} did not start within {timeout_s:g} s: raise start_timeout_s"
            raise UnavailableError(reason) from error
        raise


async def _greet(process: asyncio.subprocess.Process, config: WorkerConfig) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(ConnectionError):  # a worker that died at once is reported below
        process.stdin.write(to_json(config).encode() + b"\n")
        await process.stdin.drain()
    line = await process.stdout.readline()
    if not line:
        status = await process.wait()
        raise UnavailableError(f"{config.name} ended with status {status} before it served: see its output")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise WorkerStartError(f"{config.name}: {answer['error']}")
    return answer
