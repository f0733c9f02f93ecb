"""Process of one rank in a comparison of prefill schemes. It executes one command after the other.

The chain runs on the real engine over the real links. It does not push its KV to a generation group, because the other
schemes do not push KV either. A command sets the simulated speed of all links, both of the chain and of the other
schemes.
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
"""Timeout in seconds after which a rank without an answer counts as failed. Longer than any command takes."""
_CHAIN, _GROUP, _PROBE = Epoch(1), Epoch(2), Epoch(3)


@dataclass(frozen=True)
class Task:
    """Command to prefill one prompt on all ranks, or on some of them."""

    scheme: str
    """Name of the prefill scheme: `kvr` for the chain, or a name in SCHEMES."""
    token_ids: tuple[int, ...]
    chunks: tuple[TokenRange, ...] = ()
    """Token ranges that the ranks of a chain prefill, in rank order. Empty for other schemes."""
    ranks: tuple[int, ...] = ()
    """Ranks that form the chain, in order. Empty: the first ranks from rank 0, one for each chunk."""
    kernel: str = ""
    """Attention kernel to use, a name in KERNELS. Empty: the fastest on this machine."""
    pace: Pace = FULL_SPEED


@dataclass(frozen=True)
class Answer:
    """Result that one rank returns for one prefill task."""

    token: int | None = None
    """First output token; None on ranks that do not compute it."""
    report: JobReport | None = None
    """Report of the job on a rank of a chain; None for other schemes."""

    @property
    def compute_s(self) -> float:
        """Seconds that this rank of a chain spent computing, without its waits for the KV of earlier ranks."""
        assert self.report is not None
        return (self.report.end_ns - self.report.start_ns) / 1e9 - self.report.wait_s


@dataclass(frozen=True)
class RankSpec:
    """Parameters with which the process of a rank is started."""

    folder: Path
    dtype: str
    rank: int
    num_ranks: int
    cores: tuple[int, ...]
    """CPU cores that the rank uses, with one thread per core."""
    port: int
    """TCP port of the key-value store (rendezvous) through which the ranks find each other."""


Command = tuple[Pace, MessageSizes] | RateProbe | Task
Reply = Answer | float | Points | None


def run_rank(spec: RankSpec, pipe: Connection) -> None:
    """Run the process of one rank. Send None through the pipe when the rank is ready, and then one reply for each
    command, until the pipe is closed."""
    use_cores(spec.cores, len(spec.cores))
    rank = _Rank(spec)
    pipe.send(None)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(rank.obey(pipe.recv()))
    rank.close()


class _Sender:
    """KvSender that discards the KV of a job and keeps only the first output token."""

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
    """One rank, connected to all other ranks, with its model and engine."""

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
        """Execute a command and return the reply. The parent process sends a command to all ranks, and waits for all
        replies before it sends the next one."""
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
