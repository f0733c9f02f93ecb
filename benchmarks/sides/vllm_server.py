"""vLLM's CPU build as a server, in its own environment (peers/setup_vllm_cpu.sh), with the settings that suit it best.

All cores compute. Chunked prefill is on, in chunks as large as vLLM chooses for servers. Prefix caching is off, so
that no prompt is served from memory. Nothing is logged for a request. OMP_NUM_THREADS is left unset, because vLLM warns
that its other processes would spin with it.
"""

import asyncio
import collections
import contextlib
import json
import os
import signal
import socket
import urllib.request
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.sides.front_doors import HOST, MODEL, VllmDoor

_MODULE = "vllm.entrypoints.openai.api_server"
"""Runs what `vllm serve` runs: that command itself fails in the CPU build, whose package has another name."""
_READY = b"Application startup complete"
_KV_GB = 4
_MAX_TOKENS = 8192
_LISTEN_S, _POLL_S, _END_S = 30.0, 0.05, 30.0
_NUM_LINES = 20


@dataclass(frozen=True)
class VllmSpec:
    """How vLLM is started."""

    python: Path
    """Python of vLLM's environment."""
    model: Path
    """Hugging Face folder of the model."""
    dtype: str
    cores: Sequence[int]
    """Cores that compute, one thread each."""
    options: Sequence[str] = ()
    """More options of `vllm serve`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More variables of vLLM's environment."""

    def command(self, port: int) -> list[str]:
        """Return the command that serves on this port."""
        variables = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in self.cores),
            "VLLM_CPU_KVCACHE_SPACE": str(_KV_GB),
            **self.environment,
        }
        options = {
            "--model": str(self.model),
            "--served-model-name": MODEL,
            "--host": HOST,
            "--port": str(port),
            "--dtype": self.dtype,
            "--max-model-len": str(_MAX_TOKENS),
        }
        flags = ("--enable-chunked-prefill", "--no-enable-prefix-caching", "--disable-uvicorn-access-log")
        given = [part for option in options.items() for part in option]
        environment = ["env", *(f"{name}={value}" for name, value in variables.items())]
        return [*environment, str(self.python), "-m", _MODULE, *given, *flags, *self.options]


@contextlib.asynccontextmanager
async def vllm_server(spec: VllmSpec) -> AsyncIterator[VllmDoor]:
    """Start vLLM and yield its front door when it serves, after a minute or so; end all its processes afterwards.
    Raises RuntimeError with its last lines when it ends before."""
    port = _free_port()
    process = await asyncio.create_subprocess_exec(
        *spec.command(port), stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True, limit=2**20
    )
    assert process.stdout is not None
    lines: collections.deque[str] = collections.deque(maxlen=_NUM_LINES)
    reading = asyncio.create_task(_read(process.stdout, lines, ready := asyncio.Event()))
    try:
        await _served(reading, ready, lines)
        await _listening(port)
        yield VllmDoor(port, await asyncio.to_thread(_version, port), process.pid)
    finally:
        await _end(process)
        await reading


async def _read(output: asyncio.StreamReader, lines: "collections.deque[str]", ready: asyncio.Event) -> None:
    """Read all lines to the end, because a process that is not read blocks when the pipe is full; set `ready` when the
    server serves."""
    while line := await output.readline():
        lines.append(line.decode(errors="replace").rstrip())
        if _READY in line:
            ready.set()


async def _served(reading: "asyncio.Task[None]", ready: asyncio.Event, lines: "collections.deque[str]") -> None:
    """Wait until the server serves. Raises RuntimeError when its output ends before."""
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait((waiting, reading), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if not ready.is_set():
        raise RuntimeError("\n".join(("vLLM ended before it served; its last lines:", *lines)))


async def _listening(port: int) -> None:
    """Wait until the server takes connections, which it does shortly after it has reported that it is up. Raises
    TimeoutError when it does not."""
    async with asyncio.timeout(_LISTEN_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(HOST, port)
            except ConnectionRefusedError:
                await asyncio.sleep(_POLL_S)
            else:
                writer.close()
                return


async def _end(process: Process) -> None:
    """End the server as Ctrl-C does. After a while, kill the remaining processes of its session."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        port: int = found.getsockname()[1]
        return port


def _version(port: int) -> str:
    with urllib.request.urlopen(f"http://{HOST}:{port}/version") as answer:
        return str(json.load(answer)["version"])
