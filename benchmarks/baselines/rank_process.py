"""One rank of a comparison: a process that executes one command after the other.

The chain runs on the real engine over the real links. It does not push its KV to a generation group, because the other
schemes do not either. All links, of the chain and of the schemes, have the pace that a command sets.
"""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.hosting import use_cores
from baton.process.clock import SystemClock
from baton.sampling_params import SamplingParams
from baton.types import Epoch, JobId, Rank, RequestId, SampledToken, TokenRange
from benchmarks.baselines.link_probe import LinkProbe, MessageSizes, Points
from benchmarks.baselines.paced import PacedGroup, Pacer, paced
from benchmarks.baselines.pacing import FULL_SPEED, Pace
from benchmarks.baselines.schemes import SCHEMES, Group
from benchmarks.support.rates import KERNELS, RateProbe
from prefill_workers.communicators import Rendezvous
from prefill_workers.config import PrefillConfig
from prefill_workers.engine import PrefillEngine
from prefill_workers.job import Job, JobReport
from prefill_workers.links import ConnectLinks, LinkHandler, Links
from prefill_workers.torch_links import connect_torch_links, make_group

HOST = "127.0.0.1"
WAIT_S = 300.0
"""Seconds without an answer after which a rank counts as failed; longer than any command takes."""
_CHAIN, _GROUP, _PROBE = Epoch(1), Epoch(2), Epoch(3)


@dataclass(frozen=True)
class Task:
    """One prefill by all ranks, or by some of them."""

    scheme: str
    """Scheme of the prefill: kvr, or a name of SCHEMES."""
    token_ids: tuple[int, ...]
    chunks: tuple[TokenRange, ...] = ()
    """Chunks of the chain's ranks, in rank order."""
    ranks: tuple[int, ...] = ()
    """Ranks of the chain; empty: one rank per chunk, from rank 0."""
    kernel: str = ""
    """Attention kernel, a name of KERNELS; empty: the fastest."""
    pace: Pace = FULL_SPEED


@dataclass(frozen=True)
class Answer:
    """Result of one rank for a task."""

    token: int | None = None
    """First output token, on the rank that has it; None on others."""
    report: JobReport | None = None
    """Report of a rank of a chain; None for other schemes."""

    @property
    def compute_s(self) -> float:
        """Seconds in which this rank of a chain was not waiting for KV of earlier ranks."""
        assert self.report is not None
        return (self.report.end_ns - self.report.start_ns) / 1e9 - self.report.wait_s


@dataclass(frozen=True)
class RankSpec:
    """Arguments of a rank's process."""

    folder: Path
    dtype: str
    rank: int
    num_ranks: int
    cores: tuple[int, ...]
    """Cores of the rank, one thread per core."""
    port: int
    """Port of the store through which the ranks connect."""


Command = tuple[Pace, MessageSizes] | RateProbe | Task
Reply = Answer | float | Points | None


def run_rank(spec: RankSpec, pipe: Connection) -> None:
    """Run a rank's process: send None when it is ready, then a reply to each command, until the pipe is closed."""
    use_cores(spec.cores, len(spec.cores))
    rank = _Rank(spec)
    pipe.send(None)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(rank.obey(pipe.recv()))
    rank.close()


class _Sender:
    """KvSender that keeps only the first output token."""

    num_present = 0

    def __init__(self) -> None:
        self.first: int | None = None

    def push(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        pass

    def received(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        pass

    def finish(self, firsts: tuple[SampledToken, ...]) -> None:
        self.first = firsts[0].token_id if firsts else None

    def abort(self, error: BaseException) -> None:
        pass


class _Rank:
    """A rank that is connected to the others."""

    def __init__(self, spec: RankSpec) -> None:
        self._rank, self._num_jobs = spec.rank, 0
        self._decoder = load_decoder(spec.folder, dtype=spec.dtype)
        self._fastest = self._decoder.kernel
        self._pacer = Pacer(spec.rank)
        rendezvous = Rendezvous(_CHAIN, Rank(spec.rank), spec.num_ranks, f"{HOST}:{spec.port}", HOST, WAIT_S)
        group = cast(Group, make_group(replace(rendezvous, epoch=_GROUP)))
        self._group = PacedGroup(group, self._pacer, timedelta(seconds=WAIT_S))
        connect = self._connector(rendezvous)
        self._probe = LinkProbe(spec.rank, _PROBE, connect(_PROBE))
        self._engine = PrefillEngine(self._decoder, SystemClock(), PrefillConfig())
        self._engine.start_epoch(_CHAIN, Rank(spec.rank), spec.num_ranks, connect(_CHAIN))

    def obey(self, command: Command) -> Reply:
        """Execute a command and return its reply. The parent sends a task to all ranks, and waits for all replies
        before the next command."""
        if isinstance(command, Task):
            return self._prefill(command)
        if isinstance(command, RateProbe):
            return command.run()
        pace, sizes = command
        self._pacer.set(pace)
        return self._probe.times(sizes)

    def close(self) -> None:
        self._probe.close()
        self._engine.close()
        self._pacer.close()

    def _connector(self, rendezvous: Rendezvous) -> Callable[[Epoch], ConnectLinks]:
        def of_epoch(epoch: Epoch) -> ConnectLinks:
            def connect(handler: LinkHandler) -> Links:
                return connect_torch_links(replace(rendezvous, epoch=epoch), handler)

            return paced(connect, self._pacer)

        return of_epoch

    def _prefill(self, task: Task) -> Answer:
        self._num_jobs += 1
        self._pacer.set(task.pace)
        self._decoder.kernel = KERNELS[task.kernel] if task.kernel else self._fastest
        if task.scheme == "kvr":
            return self._run_chain(task)
        logits = SCHEMES[task.scheme](self._decoder, task.token_ids, self._group)
        return Answer(token=None if logits is None else int(logits.argmax()))

    def _run_chain(self, task: Task) -> Answer:
        ranks = tuple(Rank(each) for each in (task.ranks or range(len(task.chunks))))
        if self._rank not in ranks:
            return Answer()
        params = SamplingParams(max_tokens=1)
        number = JobId(self._num_jobs)
        job = Job(number, _CHAIN, RequestId("r"), 1, ranks, task.chunks, task.token_ids, params=params)
        kv_sender, done = _Sender(), threading.Event()
        future: Future[JobReport] = self._engine.submit(job, kv_sender)
        future.add_done_callback(lambda _: done.set())
        done.wait()
        return Answer(kv_sender.first, future.result())
