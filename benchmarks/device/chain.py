"""Chain of prefill processes that share one device and are connected by gloo. Each process has its own model and
engine."""

import contextlib
import functools
import itertools
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

from torch.distributed import TCPStore

from baton.modeling.device.making import make_device
from baton.modeling.forward.attention import Kernel
from baton.modeling.forward.triton.attention import triton_kernel
from baton.process.clock import SystemClock
from baton.types import Epoch, JobId, Rank, RequestId, SampledToken, TokenRange
from benchmarks.device.model import Shape, random_model
from prefill_workers.communicators import Rendezvous
from prefill_workers.config import PrefillConfig
from prefill_workers.engine import PrefillEngine
from prefill_workers.job import Job
from prefill_workers.torch_links import connect_torch_links

_HOST = "127.0.0.1"
_PATIENCE_S = 120.0


@dataclass(frozen=True)
class RankSpec:
    """Parameters with which the process of a rank is started."""

    device: str
    shape: Shape
    max_position: int
    rank: int
    num_ranks: int
    port: int
    """TCP port of the key-value store (rendezvous) through which the ranks find each other."""


class Discarding:
    """KvSender that discards all KV and all output tokens."""

    num_present = 0

    def push(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Discard KV that this rank computed."""

    def received(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Discard KV that was received from earlier ranks."""

    def finish(self, firsts: tuple[SampledToken, ...]) -> None:
        """Discard `firsts`, the first sampled token of each choice of the job, because the benchmark does not use
        them."""

    def abort(self, error: BaseException) -> None:
        """Do nothing. The job's future already raises the error."""


class Chain:
    """Processes of a chain that prefills prompts. Create with `running`."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes, self._number = pipes, 0

    @classmethod
    @contextlib.contextmanager
    def running(cls, device: str, shape: Shape, num_ranks: int, max_position: int) -> Iterator["Chain"]:
        """Start `num_ranks` processes, yield the chain when they are connected, and end the processes at the end of the
        block."""
        store = TCPStore(_HOST, 0, None, True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        with contextlib.ExitStack() as stack:
            pipes = []
            for rank in range(num_ranks):
                ours, theirs = context.Pipe()
                spec = RankSpec(device, shape, max_position, rank, num_ranks, store.port)
                process = context.Process(target=_run, args=(theirs, spec), daemon=True)
                process.start()
                theirs.close()
                stack.callback(process.join)
                stack.callback(ours.close)  # this ends the process
                pipes.append(ours)
            for pipe in pipes:
                pipe.recv()
            yield cls(pipes)

    def prefill_ms(self, num_tokens: int) -> float:
        """Return the milliseconds from sending a prompt of `num_tokens` tokens until its first output token is
        returned. The ranks get chunks of equal length."""
        self._number += 1
        num_ranks = len(self._pipes)
        edges = [num_tokens * rank // num_ranks for rank in range(num_ranks + 1)]
        job = Job(
            JobId(self._number),
            Epoch(1),
            RequestId("measured"),
            1,
            tuple(map(Rank, range(num_ranks))),
            tuple(TokenRange(start, end) for start, end in itertools.pairwise(edges)),
            [7 * at % 500 for at in range(num_tokens)],
        )
        began_s = time.perf_counter()
        for pipe in self._pipes:
            pipe.send(job)
        for pipe in self._pipes:
            if error := pipe.recv():
                raise RuntimeError(error)
        return (time.perf_counter() - began_s) * 1e3


def _run(pipe: Connection, spec: RankSpec) -> None:
    device = make_device(spec.device)
    kernel: Kernel | None = triton_kernel if spec.device == "cuda" else None
    decoder = random_model(spec.shape, device, max_position=spec.max_position, kernel=kernel)
    engine = PrefillEngine(decoder, SystemClock(), PrefillConfig(watchdog_floor_s=_PATIENCE_S))
    address = f"{_HOST}:{spec.port}"
    rendezvous = Rendezvous(Epoch(1), Rank(spec.rank), spec.num_ranks, address, _HOST, _PATIENCE_S)
    try:
        engine.start_epoch(
            rendezvous.epoch, rendezvous.rank, spec.num_ranks, functools.partial(connect_torch_links, rendezvous)
        )
        pipe.send("")
        with contextlib.suppress(EOFError):
            while True:
                error = engine.submit(pipe.recv(), Discarding()).exception()
                pipe.send("" if error is None else repr(error))
    finally:
        engine.close()
        device.link.rest()
