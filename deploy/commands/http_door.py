"""Runs the HTTP gateway of `baton serve` as a child process of the launcher, and restarts it when it ends.

The launcher owns the listening socket. It binds the address before it starts anything else. The socket stays open when
the process is restarted, and connections that arrive in the meantime wait for the next process.

The process (`deploy.front_doors.http_process`) is started when an HttpDoor is created. It reads two lines of JSON:
first an HttpPlan, with which it loads everything while the cluster starts, then an HttpTarget when the cluster serves.
It writes one line when it serves, and an empty line at each heartbeat. It exits at the end of its standard input, so it
does not outlive a killed launcher. A thread of the launcher, `http-door`, waits for the end of the process, and kills
it if the heartbeats stop.
"""

import contextlib
import json
import os
import selectors
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import field
from pathlib import Path

from baton.errors import ConfigError
from baton.process.clock import SystemClock
from baton.results.completion import ModelInfo
from baton.settings.addresses import join_address
from baton.settings.base import Seconds, settings, to_json, values_of
from baton.settings.place import LogLines
from baton.settings.tracing import TraceExport
from deploy.config.cluster import ClusterConfig
from deploy.config.sections import HttpSection
from deploy.groups.restarts import RESTART_PAUSES, Restarts
from gateway.listening import open_socket

_MODULE = "deploy.front_doors.http_process"
_START_S = 120.0
"""Timeout in seconds for the process to start to serve. It must load a tokenizer, possibly on a busy machine."""
_END_S = 10.0
"""Seconds within which the process must exit by itself after the grace period for running requests. If it does not, it
is killed."""
_EXAMPLE = '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 48}'
_LOOPBACKS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Wildcard addresses, which stand for all interfaces of a machine, and the loopback address to use for each in URLs."""


@settings
class HttpPlan(LogLines, TraceExport):
    """Settings of the HTTP gateway that do not change when its process is restarted."""

    folder: Path = field(kw_only=True)
    """Folder of the model, with its tokenizer and chat template."""
    socket: int = field(kw_only=True)
    """File descriptor of the bound socket, which the process inherits."""
    section: HttpSection = field(kw_only=True)
    control_tokens_in_text: bool = False
    """True if the text of a control token in a chat message is tokenized as the control token. False: it is ordinary
    text."""
    heartbeat_s: Seconds = 1.0
    """Seconds between two heartbeats."""


@settings
class HttpTarget:
    """Address of the orchestrator, and the model that the HTTP gateway serves. Sent to the gateway's process as a line
    of JSON."""

    address: str
    """Address of the orchestrator, host:port."""
    model: ModelInfo


class HttpDoor:
    """Manager of the HTTP gateway's process: starts it, restarts it when it ends, and ends it. Must be used by the
    launcher's main thread."""

    def __init__(self, config: ClusterConfig, folder: Path, report: Callable[[str], None]) -> None:
        """Bind the address and start the process, which does not serve yet. `report` is called with lines of text
        for the user, from any thread. Raises ConfigError if the address cannot be bound or the certificate cannot be
        read."""
        section = config.http
        _check_certificate(section)
        self._socket = open_socket(section.host, section.port)
        self._section = section
        self._plan = HttpPlan(
            **values_of(LogLines, config),
            **values_of(TraceExport, config.orchestrator),
            folder=folder,
            socket=self._socket.fileno(),
            section=section,
            control_tokens_in_text=config.orchestrator.control_tokens_in_text,
            heartbeat_s=config.supervision.heartbeat_s,
        )
        self._dead_after_s = config.supervision.dead_after_s
        self._print = report
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._decided = threading.Event()
        """Set when the orchestrator's address is known, or when this object is closed. Until then, the process cannot
        serve."""
        self._target: HttpTarget | None = None  # guarded by the lock, as are `_process` and `_is_told`
        self._process: subprocess.Popen[str] | None = None
        self._is_told = False
        """True if the HttpTarget (the orchestrator's address and model) was sent to the current process."""
        self._has_served = False
        self._thread = threading.Thread(target=self._keep, name="http-door", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """URL of the gateway on this machine, without a path."""
        host = _LOOPBACKS.get(self._section.host, self._section.host)
        address = join_address(host, self._socket.getsockname()[1])
        return f"{'https' if self._section.certificate else 'http'}://{address}"

    def serve(self, target: str, model: ModelInfo) -> None:
        """Serve this model through the orchestrator at `target`. If the process already serves through another target,
        a new process replaces it."""
        with self._lock:
            self._target = HttpTarget(target, model)
            if self._process is not None and self._is_told:
                _ask_to_end(self._process)
        self._decided.set()

    def close(self) -> None:
        """End the process and release the address. Running responses may continue until the grace period has passed.
        Idempotent."""
        self._closing.set()
        with self._lock:
            process = self._process
            if process is not None and not self._is_told:
                process.kill()
        self._decided.set()
        if process is not None:
            _end(process, self._section.grace_s)
        self._thread.join()
        self._socket.close()

    def _keep(self) -> None:
        restarts = Restarts(RESTART_PAUSES, SystemClock())
        while not self._closing.is_set():
            served, why = self._live(restarts)
            if self._closing.is_set() or served is not self._target:
                continue
            pause_s = restarts.ended()
            self._report(f"the HTTP gateway has ended ({why}): starting it again in {pause_s:g} s")
            self._closing.wait(pause_s)

    def _live(self, restarts: Restarts) -> tuple[HttpTarget | None, str]:
        """Run one process until it ends. Return its target and the reason why it ended."""
        with self._lock:
            if self._closing.is_set():
                return self._target, "closing"
            try:
                self._process = process = _start(self._plan)
            except OSError as error:
                return self._target, f"it cannot be started: {error.strerror}"
            self._is_told = False
        self._decided.wait()
        with self._lock:
            target, self._is_told = self._target, True
            if target is not None and not self._closing.is_set():
                _tell(process, target)
        answer = _first_answer(process)
        if "port" in answer:
            restarts.began()
            self._tell_ready()
            why = _until_end(process, self._dead_after_s)
        else:
            process.kill()  # no effect if it has ended
            why = f"status {process.wait()}"
        _close_pipes(process)
        with self._lock:
            self._process = None
        return target, str(answer.get("error") or why)

    def _report(self, line: str) -> None:
        """Show a line to the user, if that is possible. A failure to show it does not stop HTTP."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
            self._print(line)

    def _tell_ready(self) -> None:
        if self._has_served:
            self._report(f"the HTTP gateway serves again on {self.url}")
            return
        self._has_served = True
        self._report(f"OpenAI's API over HTTP: {self.url}/v1, for example")
        header = "-H 'content-type: application/json'"
        self._report(f"  curl {self.url}/v1/chat/completions {header} -d '{_EXAMPLE}'")
        if self._section.console:
            self._report(f"web console: {self.url}/console")


@contextlib.contextmanager
def http_door(config: ClusterConfig, folder: Path, report: Callable[[str], None]) -> Iterator[HttpDoor | None]:
    """Context manager. Start an HttpDoor, which runs the HTTP gateway, and yield it; yield None if HTTP is not
    configured. The HttpDoor is closed on exit."""
    if config.http.port < 0:
        yield None
        return
    door = HttpDoor(config, folder, report)
    try:
        yield door
    finally:
        door.close()


def _check_certificate(section: HttpSection) -> None:
    if not section.certificate:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(section.certificate, section.private_key)
    except OSError as error:  # ssl's errors among them
        why = error.strerror or str(error)
        raise ConfigError(
            f"http.certificate = {section.certificate} cannot be used ({why}): name its chain and its key, in PEM"
        ) from error


def _start(plan: HttpPlan) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        (sys.executable, "-m", _MODULE),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(plan.socket,),
        process_group=0,  # only the launcher handles Ctrl-C of a terminal
    )
    _tell(process, plan)
    return process


def _tell(process: "subprocess.Popen[str]", message: HttpPlan | HttpTarget) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # if it died, no answer follows
        process.stdin.write(to_json(message) + "\n")
        process.stdin.flush()


def _first_answer(process: "subprocess.Popen[str]") -> dict[str, object]:
    """Return the first answer of the process; empty if the process ends before it answers, or does not serve in
    time."""
    assert process.stdout is not None
    late = threading.Timer(_START_S, process.kill)
    late.start()
    try:
        found: dict[str, object] = json.loads(process.stdout.readline() or "{}")
    except ValueError:
        return {"error": "its answer is none: see the lines above"}
    finally:
        late.cancel()
        late.join()
    return found


def _until_end(process: "subprocess.Popen[str]", dead_after_s: float) -> str:
    """Wait for the end of a process that sends heartbeats. Kill it if none arrives for `dead_after_s` seconds. Return
    why it ended."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as signs:
        signs.register(process.stdout, selectors.EVENT_READ)
        while signs.select(dead_after_s):
            if not os.read(process.stdout.fileno(), 4096):  # end of file
                return f"status {process.wait()}"
    process.kill()
    process.wait()
    return f"it gave no sign of life for {dead_after_s:g} s, and was killed"


def _ask_to_end(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already
        process.stdin.close()


def _close_pipes(process: "subprocess.Popen[str]") -> None:
    """Close the pipes of a process that has ended. Input that it has not read is discarded."""
    _ask_to_end(process)
    assert process.stdout is not None
    process.stdout.close()


def _end(process: "subprocess.Popen[str]", grace_s: float) -> None:
    process.terminate()
    try:
        process.wait(grace_s + _END_S)
    except subprocess.TimeoutExpired:
        process.kill()
