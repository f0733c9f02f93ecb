"""The ranks of one comparison: a process each, on cores of its own, that prefills by any scheme when it is told to.

The chain runs on the real engine over the real links, and pushes to nobody, as its peers do not either. All schemes are
timed alike: from the command to all ranks until the last token's logits, or the token drawn from them, are there.
"""

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from baton.clock import SystemClock
from baton.ids import Epoch, JobId, Rank, RequestId
from baton.sampling_params import SamplingParams
from baton.types import SampledToken, TokenRange
from benchmarks.baselines.schemes import SCHEMES
from modeling.threads import use_cores
from modeling.weights import load_decoder
from prefill_workers.engine import PrefillEngine
from prefill_workers.job import Job, JobReport
from prefill_workers.torch_links import Meeting, connect_torch_links, make_group

HOST = "127.0.0.1"
_WAIT_S = 120.0


@dataclass(frozen=True)
class Task:
    """One prefill by all ranks."""

    scheme: str
    """kvr, or a name of SCHEMES."""
    token_ids: tuple[int, ...]
    chunks: tuple[TokenRange, ...] = ()
    """Of the chain's ranks."""


@dataclass(frozen=True)
class RankSpec:
    """What a rank's process is."""

    folder: Path
    dtype: str
    rank: int
    num_ranks: int
    cores: tuple[int, ...]
    """One thread each."""
    port: int
    """Of the store where the ranks meet."""


class Ranks:
    """The parent's end of all processes."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes

    @classmethod
    @contextlib.contextmanager
    def running(cls, folder: Path, dtype: str, cores: Sequence[tuple[int, ...]]) -> Iterator[Self]:
        """A rank on each of `cores`, with a thread for each; ended on leaving."""
        store = dist.TCPStore(HOST, 0, None, True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        pipes: list[Connection] = []
        processes: list[BaseProcess] = []
        try:
            for rank, own in enumerate(cores):
                ours, theirs = context.Pipe()
                spec = RankSpec(folder, dtype, rank, len(cores), own, store.port)
                processes.append(context.Process(target=_main, args=(spec, theirs), daemon=True))
                processes[-1].start()
                theirs.close()
                pipes.append(ours)
            made = cls(pipes)
            made._answers()
            yield made
        finally:
            for pipe in pipes:
                pipe.close()  # they leave when nobody speaks to them any more
            for process in processes:
                process.join()

    def run(self, task: Task) -> tuple[float, int]:
        """`(seconds, first token)` of one prefill."""
        start_s = time.perf_counter()
        for pipe in self._pipes:
            pipe.send(task)
        tokens = [token for token in self._answers() if token is not None]
        return time.perf_counter() - start_s, tokens[0]

    def _answers(self) -> list[int | None]:
        answers = []
        for pipe in self._pipes:
            assert pipe.poll(_WAIT_S), "a rank does not answer"
            answers.append(pipe.recv())
        return answers


class _Nowhere:
    """A KvOutlet that keeps the first token only."""

    def __init__(self) -> None:
        self.first: int | None = None

    def push(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        pass

    def finish(self, firsts: tuple[SampledToken, ...]) -> None:
        self.first = firsts[0].token_id if firsts else None

    def abort(self, error: BaseException) -> None:
        pass


def _main(spec: RankSpec, pipe: Connection) -> None:
    """A rank's process: answers each task with the token, if it has it."""
    use_cores(spec.cores, len(spec.cores))
    decoder = load_decoder(spec.folder, dtype=spec.dtype)
    meeting = Meeting(Epoch(1), Rank(spec.rank), spec.num_ranks, f"{HOST}:{spec.port}", HOST, _WAIT_S)
    group: Any = make_group(replace(meeting, epoch=Epoch(2)))  # beside the chain's own
    engine = PrefillEngine(decoder, SystemClock())
    engine.start_epoch(Epoch(1), Rank(spec.rank), spec.num_ranks, lambda handler: connect_torch_links(meeting, handler))
    pipe.send(None)
    number = 0
    with contextlib.suppress(EOFError):
        while True:
            task = pipe.recv()
            number += 1
            if task.scheme == "kvr":
                pipe.send(_run_chain(engine, spec.rank, task, JobId(number)))
            else:
                logits = SCHEMES[task.scheme](decoder, task.token_ids, group)
                pipe.send(None if logits is None else int(logits.argmax()))
    engine.close()


def _run_chain(engine: PrefillEngine, rank: int, task: Task, number: JobId) -> int | None:
    if rank >= len(task.chunks):
        return None
    ranks = tuple(Rank(each) for each in range(len(task.chunks)))
    params = SamplingParams(max_tokens=1)
    job = Job(number, Epoch(1), RequestId("r"), 1, ranks, task.chunks, task.token_ids, params=params)
    outlet, done = _Nowhere(), threading.Event()
    future: Future[JobReport] = engine.submit(job, outlet)
    future.add_done_callback(lambda _: done.set())
    done.wait()
    future.result()
    return outlet.first
