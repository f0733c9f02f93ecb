"""Starts the ranks of one comparison and sends them commands. Each rank is a process on its own cores, and can prefill
with any scheme.

The time of every scheme is measured in the same way. It begins when the command is sent to all ranks. It ends when the
last token's logits, or the token sampled from them, have arrived.
"""

import contextlib
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Self

import torch.distributed as dist

from benchmarks.baselines.link_probe import MessageSizes, Points, medians
from benchmarks.baselines.pacing import FULL_SPEED, Pace
from benchmarks.baselines.rank_process import HOST, WAIT_S, Answer, Command, RankSpec, Reply, Task, run_rank
from benchmarks.support.rates import RateProbe

_END_S = 10.0


@dataclass(frozen=True)
class Outcome:
    """Duration and result of one prefill."""

    seconds: float
    token: int
    answers: tuple[Answer, ...]
    """Results of the individual ranks, in rank order."""


class Ranks:
    """Connections of the parent process to all ranks of a comparison. Commands are sent to the ranks' processes through
    pipes."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes

    @classmethod
    @contextlib.contextmanager
    def running(cls, folder: Path, dtype: str, cores: Sequence[tuple[int, ...]]) -> Iterator[Self]:
        """Start one rank for each entry of `cores`, with one thread per core, and yield the ranks. Their processes are
        ended at the end of the block."""
        store = dist.TCPStore(HOST, 0, None, True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        pipes: list[Connection] = []
        processes: list[BaseProcess] = []
        try:
            for rank, own in enumerate(cores):
                ours, theirs = context.Pipe()
                spec = RankSpec(folder, dtype, rank, len(cores), own, store.port)
                processes.append(context.Process(target=run_rank, args=(spec, theirs), daemon=True))
                processes[-1].start()
                theirs.close()
                pipes.append(ours)
            made = cls(pipes)
            made._replies()
            yield made
        finally:
            for pipe in pipes:
                pipe.close()  # ranks exit when their pipe closes
            for process in processes:
                process.join(_END_S)
                process.kill()

    def __len__(self) -> int:
        return len(self._pipes)

    def run(self, task: Task) -> Outcome:
        """Run one prefill on all ranks together. Blocks until it is done."""
        return self.run_each([task] * len(self))

    def run_each(self, tasks: Sequence[Task]) -> Outcome:
        """Run a separate prefill on every rank, all at the same time. `seconds` of the outcome is the time of the
        slowest rank. Blocks until all are done."""
        start_s = time.perf_counter()
        answers = [answer for answer in self._ask(tasks) if isinstance(answer, Answer)]
        seconds = time.perf_counter() - start_s
        token = next(answer.token for answer in answers if answer.token is not None)
        return Outcome(seconds, token, tuple(answers))

    def link_points(self, sizes: Sequence[int], repeats: int, pace: Pace = FULL_SPEED) -> Points:
        """Measure single messages between the first two ranks while the ranks do no other work. Return (bytes, median
        seconds) for each size."""
        command = (pace, MessageSizes(tuple(sizes), repeats))
        (points, *_) = self._ask([command] * len(self))
        assert isinstance(points, tuple)
        return medians(points)

    def rates(self, probe: RateProbe, num_busy: int) -> list[float]:
        """Measure a rate of the hardware (`probe`: for example memory bandwidth) on each of the first `num_busy` ranks,
        while they all run at the same time. The other ranks are idle. Return one rate per busy rank."""
        for pipe in self._pipes[:num_busy]:
            pipe.send(probe)
        return [rate for rate in self._replies(num_busy) if isinstance(rate, float)]

    def _ask(self, commands: Sequence[Command]) -> list[Reply]:
        for pipe, command in zip(self._pipes, commands, strict=True):
            pipe.send(command)
        return self._replies()

    def _replies(self, num_ranks: int | None = None) -> list[Reply]:
        replies = []
        for pipe in self._pipes[:num_ranks]:
            assert pipe.poll(WAIT_S), "a rank does not answer"
            replies.append(pipe.recv())
        return replies
