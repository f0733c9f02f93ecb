"""Runs workers as child processes: starts them, waits for their end, and kills them.

Parent and child exchange lines of text. The parent writes a WorkerConfig as one line of JSON to the child's standard
input, and keeps the pipe open. The child answers with one line of JSON on standard output, `{"port": ...}` or
`{"error": ...}`. To change the child's role, the parent writes another WorkerConfig. The child exits at the end of its
input, so it does not outlive a killed parent.

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
"""Seconds within which a worker must exit by itself. If it does not, it is killed."""


class WorkerStartError(BatonError):
    """Error: a worker refused to start. The text is the line of error text that the worker sent."""


@dataclass
class WorkerProcess:
    """WorkerHandle of a worker that runs in a child process."""

    config: WorkerConfig
    endpoint: str
    """Address of the worker's gRPC server, host:port."""
    process: asyncio.subprocess.Process
    start_timeout_s: float
    """Timeout in seconds for the child process to serve after a change of its role."""
    crash_note: str = ""
    """Path of the file to which the child process writes a note if it crashes. Empty: it writes no note."""

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
        """Request the child process to serve with this configuration, and wait until it does. Raises WorkerStartError
        or UnavailableError if this fails; then the process has ended."""
        answer = await _served(self.process, config, self.start_timeout_s)
        self.config, self.endpoint = config, join_address(config.place.host, answer["port"])

    def kill(self) -> None:
        """Send SIGKILL to the process, which also ends a process that is stopped (SIGSTOP). Does nothing if the process
        has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)

    async def close(self) -> None:
        """Close the worker's standard input, which requests the worker to exit. Kill the worker if it has not exited
        after CLOSE_GRACE_S seconds. Returns when the process has ended."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            await asyncio.wait_for(self.process.wait(), CLOSE_GRACE_S)
        except TimeoutError:
            self.kill()
            await self.process.wait()


class ProcessSpawner:
    """Spawner that starts workers as child processes of this process.

    `start_timeout_s` is the timeout in seconds for a worker to start to serve. `module` is the Python module that a
    worker's process runs.
    """

    def __init__(self, start_timeout_s: float, module: str = "deploy.groups.worker_process") -> None:
        self._timeout_s = start_timeout_s
        self._module = module

    async def start(self, config: WorkerConfig) -> WorkerProcess:
        """Start a worker's process, by default `python -m deploy.groups.worker_process`, and wait until it serves.
        Raises WorkerStartError with the worker's reason if it refuses to start. Raises UnavailableError if its process
        ends or does not answer in time."""
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
