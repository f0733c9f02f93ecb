"""The orchestrator as a child process that can be killed: a keeper that sends it heartbeats and replaces it, and the
child itself, `python -m deploy.chaos.orchestrator`.

The parent writes pickles to the child's standard input: an OrchestratorLife first, then views of the cluster, which
serve as heartbeats. The child answers each with a line of JSON, `{"port": ...}` or `{"error": ...}`, and exits at the
end of its input. The keeper runs on the parent's loop, in one task.
"""

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from baton.clock import Clock
from baton.errors import BatonError, UnavailableError
from baton.process.endless import Pauses, repeat, tell_end
from baton.results import ModelInfo
from deploy.groups.group import Heartbeat
from orchestrator.api.host import OrchestratorHost
from orchestrator.membership.view import ClusterView, Orders
from orchestrator.requests.config import OrchestratorConfig
from planning.planner import ChainPlanner

logger = logging.getLogger(__name__)

_START_S = 60.0
_CLOSE_GRACE_S = 5.0


@dataclass(frozen=True)
class OrchestratorLife:
    """What an orchestrator process starts with."""

    folder: Path
    """Folder of the resolved model, which has its tokenizer."""
    model: ModelInfo
    eos_token_ids: tuple[int, ...]
    config: OrchestratorConfig
    planner: ChainPlanner
    host: str
    port: int = 0


class ProcessKeeper:
    """Owns the orchestrator's process, and replaces it when it has ended or has been silent for too long."""

    def __init__(
        self, life: Callable[[], OrchestratorLife], view: Callable[[], ClusterView], heartbeat: Heartbeat, clock: Clock
    ) -> None:
        """Make a keeper of a process that is not started yet. `life` is called once, when the workers serve; `view` at
        each heartbeat."""
        self.port = 0
        """Port that all lives of the orchestrator listen on; 0 before the first has started."""
        self._make_life = life
        self._life: OrchestratorLife | None = None
        self._view = view
        self._heartbeat = heartbeat
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self._news = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._last_seen_s = 0.0
        """When the process last answered, or was replaced, on the clock."""
        self._closing = False

    @property
    def pid(self) -> int:
        """Process id of the present life; 0 when there is none."""
        return 0 if self._process is None or self._process.returncode is not None else self._process.pid

    def tell(self) -> None:
        """Send the changed view to the orchestrator now, without waiting for the next heartbeat."""
        self._news.set()

    def send_signal(self, number: signal.Signals) -> bool:
        """Send the process a signal. Return whether there was a process."""
        if not self.pid:
            return False
        os.kill(self.pid, number)
        self._news.set()
        return True

    async def start(self) -> None:
        """Start the orchestrator and return when it serves; from then on it is kept alive. Raises its error when it
        cannot serve."""
        await self._begin()
        self._keeping = asyncio.create_task(self._keep())
        self._keeping.add_done_callback(self._tell_end)

    async def close(self) -> None:
        """End the orchestrator's process and its supervision. Idempotent."""
        self._closing = True
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _CLOSE_GRACE_S)
        except TimeoutError:
            await _kill(process)

    async def _keep(self) -> None:
        self._last_seen_s = self._clock.now_s()
        pauses = Pauses(self._heartbeat.interval_s, self._heartbeat.dead_after_s)
        await repeat("the supervision of the orchestrator", self._turn, pauses)

    def _tell_end(self, keeping: "asyncio.Task[None]") -> None:
        if not self._closing:
            tell_end("the supervision of the orchestrator")(keeping)

    async def _turn(self) -> None:
        with contextlib.suppress(TimeoutError):  # no news: the regular heartbeat is due
            await asyncio.wait_for(self._news.wait(), self._heartbeat.interval_s)
        self._news.clear()
        if await self._answers():
            self._last_seen_s = self._clock.now_s()
        elif not self.pid or self._clock.now_s() - self._last_seen_s > self._heartbeat.dead_after_s:
            await self._replace()
            self._last_seen_s = self._clock.now_s()

    async def _answers(self) -> bool:
        """Send one heartbeat. Return whether it was answered in time."""
        try:
            await asyncio.wait_for(self._hear(), self._heartbeat.interval_s)
        except TimeoutError:
            return False
        except UnavailableError as error:
            logger.warning("%s", error)
            return False
        return True

    async def _replace(self) -> None:
        logger.warning("the orchestrator has ended, or is silent: replacing it")
        try:
            await self._begin()
        except BatonError as refused:
            logger.warning("the orchestrator did not start (%s): another try in a heartbeat", refused)

    async def _begin(self) -> None:
        if self._process is not None:
            await _kill(self._process)
        if self._life is None:
            self._life = await asyncio.to_thread(self._make_life)
        life = replace(self._life, port=self.port)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        try:
            self._send(life)
            self.port = await asyncio.wait_for(self._hear(), _START_S)
        except BaseException as error:
            await _kill(self._process)
            if isinstance(error, TimeoutError):
                raise UnavailableError(f"the orchestrator did not start within {_START_S:g} s") from error
            raise

    async def _hear(self) -> int:
        """Send the present view and return the port from the answer, which may be a late answer to an earlier view.
        Raises UnavailableError when the process has ended or cannot serve."""
        assert self._process is not None and self._process.stdout is not None
        self._send(self._view())
        line = await self._process.stdout.readline()
        if not line:
            raise UnavailableError(f"the orchestrator ended with status {await self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise UnavailableError(f"orchestrator: {answer['error']}")
        return int(answer["port"])

    def _send(self, what: OrchestratorLife | ClusterView) -> None:
        assert self._process is not None and self._process.stdin is not None
        if not self._process.stdin.is_closing():  # if closing, the process has ended, and the missing answer says so
            self._process.stdin.write(pickle.dumps(what))


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the process; return when it has ended."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def main() -> int:
    """Run an orchestrator until its standard input ends; return the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(process)d %(name)s %(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    answers, sys.stdout = sys.stdout, sys.stderr
    try:
        asyncio.run(_run(answers))
    except BatonError as error:
        _answer(answers, {"error": str(error)})
        return 1
    return 0


async def _run(answers: TextIO) -> None:
    life: OrchestratorLife = await asyncio.to_thread(_read)
    host = OrchestratorHost(life.folder, life.model, life.eos_token_ids, life.config, planner=life.planner)
    port = life.port
    try:
        while True:
            view: ClusterView = await asyncio.to_thread(_read)
            _, port, _ = await host.serve(view, life.host, port, None, Orders())
            _answer(answers, {"port": port})
    except EOFError:
        await host.stop()


def _read() -> Any:
    """Read the next pickle. Only the parent can write to this process's standard input."""
    return pickle.load(sys.stdin.buffer)


def _answer(answers: TextIO, message: dict[str, object]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
