"""A worker process with a scheduled failure: its engine ends, stops, hangs or is slow at a step that the test selects.

It runs the product's worker with a wrapped model, and with a wrapped sender (rank) or wrapped sampling and copies
(generation engine). Before each step, it looks in the model's folder for a file that schedules a failure (a "doom"). It
deletes the file when the failure strikes, so that the restarted worker does not fail again. A prompt that begins with
`DEADLY` aborts each process that computes it. deploy.groups.processes starts it as `python -m
tests.support.clusters.processes.doomed_worker`.
"""

import enum
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.forward.attention import Attention
from baton.modeling.forward.decoder import Decoder, Step
from baton.modeling.forward.sampling import sample
from baton.modeling.hosting import LoadedModel
from baton.process.clock import SystemClock
from baton.settings.place import WorkerPlace
from baton.types import SampledToken, TokenRange
from deploy.config.worker import WorkerConfig
from deploy.groups import worker_process as worker
from deploy.groups.hosting import Server, start_server
from generate_workers.engine import verified
from generate_workers.servicer import GenerationServer
from prefill_workers.config import PrefillConfig
from prefill_workers.engine import PrefillEngine
from prefill_workers.job import Job, JobReport, KvSender
from prefill_workers.servicer import PrefillServer

DEADLY = (11,) * 12
"""First tokens of a prompt that aborts a worker while it computes them."""
_SLOW_S = 12.0
"""Time in seconds for which an engine is slow or waits for a compiler: several times as long as the tests' limit for a
thread without progress."""


class Moment(enum.StrEnum):
    """Steps at which a failure can strike. PROJECT to COMPLETE happen once per layer of a rank's job, and FINISH once
    per job. FORWARD, SAMPLE and COPY belong to a generation engine, and their layer is 0."""

    PROJECT = "project"
    """Before a layer's projections."""
    PUSH = "push"
    """After a layer's projections, before their K and V are pushed to the slot."""
    ATTEND = "attend"
    """After the push has started, before attention."""
    COMPLETE = "complete"
    """After attention to the KV of all earlier tokens."""
    FINISH = "finish"
    """After all KV is computed and pushed, before the slot is committed. The layer is 0."""
    FORWARD = "forward"
    """Before the forward pass of a step."""
    SAMPLE = "sample"
    """After the forward pass, before tokens are sampled."""
    COPY = "copy"
    """After a prompt is computed, before its KV is copied for another choice."""


class End(enum.StrEnum):
    """Kinds of failure."""

    KILL = "kill"
    """The process is killed by SIGKILL."""
    STOP = "stop"
    """All threads of the process are stopped by SIGSTOP."""
    HANG = "hang"
    """The engine's thread blocks forever, but the process answers heartbeats."""
    SLOW = "slow"
    """The engine's thread runs at a fifth of a core's speed, for several times as long as the limit for a thread
    without progress."""
    COMPILE = "compile"
    """The engine's thread waits for a child process, for as long as with SLOW."""


@dataclass(frozen=True)
class Doom:
    """Kind of failure, and the step at which it strikes."""

    end: End
    moment: Moment | None = None
    """Step at which the failure strikes; None: any step."""
    layer: int | None = None
    """Layer in which the failure strikes; None: any layer."""
    num_spared: int = 0
    """Number of matching steps that are run normally before the failure strikes."""

    def lay(self, folder: Path, name: str) -> None:
        """Schedule this failure for the worker called `name`. It replaces a failure that was scheduled before."""
        draft = folder / f"{name}.draft"
        draft.write_text(json.dumps(asdict(self)))
        draft.rename(_path(folder, name))

    @classmethod
    def read(cls, path: Path) -> "Doom":
        fields = json.loads(path.read_text())
        moment = fields["moment"]
        return cls(End(fields["end"]), Moment(moment) if moment else None, fields["layer"], fields["num_spared"])


def is_pending(folder: Path, name: str) -> bool:
    """Return True if a failure is scheduled for the worker called `name` and has not struck yet."""
    return _path(folder, name).exists()


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.doom"


class Fate:
    """Lets scheduled failures strike on the engine's thread."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = _path(folder, name)
        self._doom: Doom | None = None
        self._num_left = 0

    def step(self, moment: Moment, layer: int) -> None:
        """Called before each step. Lets the scheduled failure strike if the step matches."""
        if self._doom is None and self._path.exists():
            self._doom = Doom.read(self._path)
            self._num_left = self._doom.num_spared
        doom = self._doom
        if doom is None or doom.moment not in (None, moment) or doom.layer not in (None, layer):
            return
        self._num_left -= 1
        if self._num_left < 0:
            self._doom = None
            self._path.unlink()
            _end(doom.end)


def _end(end: End) -> None:
    if end is End.HANG:
        threading.Event().wait()
    if end is End.SLOW:
        _work_slowly(time.thread_time() + _SLOW_S / 5)
    elif end is End.COMPILE:
        subprocess.run(["sleep", str(_SLOW_S)], check=True)
    else:
        os.kill(os.getpid(), signal.SIGKILL if end is End.KILL else signal.SIGSTOP)


def _work_slowly(until_s: float) -> None:
    """Use processor time in short bursts until the thread's total is `until_s`. After each burst, sleep four times as
    long."""
    while (began_s := time.thread_time()) < until_s:
        while (worked_s := time.thread_time() - began_s) < 0.01:
            pass
        time.sleep(4 * worked_s)


class DoomedDecoder(Decoder):
    """Decoder that calls `Fate.step` before its steps."""

    def __init__(self, inner: Decoder, fate: Fate) -> None:
        super().__init__(inner.config, inner.weights, inner.kernel)
        self._fate = fate

    def project(self, layer: int, hidden_TD: Tensor, step: Step) -> Tensor:
        self._fate.step(Moment.PROJECT, layer)
        return super().project(layer, hidden_TD, step)

    def attention(self, layer: int, q_TNH: Tensor, first_position: int) -> Attention:
        self._fate.step(Moment.ATTEND, layer)
        return super().attention(layer, q_TNH, first_position)

    def complete(self, layer: int, hidden_TD: Tensor, attended_TNH: Tensor) -> Tensor:
        self._fate.step(Moment.COMPLETE, layer)
        return super().complete(layer, hidden_TD, attended_TNH)

    def forward(self, token_ids: Sequence[int] | Tensor, *args: Any, **options: Any) -> Tensor:
        self._fate.step(Moment.FORWARD, 0)
        part = DEADLY[:3]  # a step may compute any section of a prompt
        if any(tuple(token_ids[at : at + len(part)]) == part for at in range(len(token_ids))):
            os.abort()
        return super().forward(token_ids, *args, **options)


class DoomedModel(LoadedModel):
    """Loader whose models call `Fate.step` before their steps."""

    def __init__(self, fate: Fate) -> None:
        super().__init__()
        self._fate = fate

    def load(self, place: WorkerPlace) -> Decoder:
        return DoomedDecoder(super().load(place), self._fate)


@dataclass(frozen=True)
class DoomedSender:
    """Sender that calls `Fate.step` before its steps. Implements KvSender."""

    inner: KvSender
    fate: Fate
    is_deadly: bool
    """True if the job's prompt aborts the process."""

    @property
    def num_present(self) -> int:
        return self.inner.num_present

    def push(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        self.fate.step(Moment.PUSH, layer)
        if self.is_deadly:
            os.abort()
        self.inner.push(layer, tokens, data)

    def received(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        self.inner.received(layer, tokens, data)

    def finish(self, firsts: Sequence[SampledToken]) -> None:
        self.fate.step(Moment.FINISH, 0)
        self.inner.finish(tuple(firsts))

    def abort(self, error: BaseException) -> None:
        self.inner.abort(error)


class DoomedEngine(PrefillEngine):
    """Prefill engine that wraps each job's sender in a DoomedSender."""

    def __init__(self, decoder: Decoder, fate: Fate, config: PrefillConfig, crash_note: str) -> None:
        super().__init__(decoder, SystemClock(), config, crash_note=crash_note)
        self._fate = fate

    def submit(self, job: Job, kv_sender: KvSender) -> "Future[JobReport]":
        is_deadly = tuple(job.prompt_ids[: len(DEADLY)]) == DEADLY
        return super().submit(job, DoomedSender(kv_sender, self._fate, is_deadly))


async def start_doomed(config: WorkerConfig, model: LoadedModel | None) -> Server:
    """Start the server of a prefill rank or of a generation engine at whose steps scheduled failures strike."""
    place, section = config.place, config.section
    fate = Fate(place.model_folder, config.name)
    if not isinstance(section, PrefillConfig):
        return await _start_engine(config, fate)
    torch.set_num_threads(place.num_threads or 1)
    decoder = DoomedDecoder(load_decoder(place.model_folder, dtype=place.dtype), fate)
    engine = DoomedEngine(decoder, fate, section, place.crash_note)
    return await PrefillServer.start(engine, place)


async def _start_engine(config: WorkerConfig, fate: Fate) -> Server:
    def doomed(moment: Moment, call: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any, **options: Any) -> Any:
            fate.step(moment, 0)
            return call(*args, **options)

        return told

    vars(verified)["sample"] = doomed(Moment.SAMPLE, sample)
    server = await start_server(config, DoomedModel(fate))
    assert isinstance(server, GenerationServer)
    residency = server.engine.residency
    residency.copy = doomed(Moment.COPY, residency.copy)  # type: ignore[method-assign]
    return server


if __name__ == "__main__":
    sys.exit(worker.main(start_doomed))
