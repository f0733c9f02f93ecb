"""Bare engine as one side of a comparison: a GenerationEngine in a separate process, called without gRPC or Ray.

The engine prefills the prompts itself. Its process waits for a load, runs it, answers with the times, and waits for the
next load.
"""

import asyncio
import contextlib
import multiprocessing
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from time import time_ns

from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.hosting import use_cores
from baton.process.clock import SystemClock
from baton.process.garbage import collect_rarely
from baton.process.own_thread import in_own_thread
from baton.sampling_params import SamplingParams
from baton.text.tokenizer import Tokenizer
from baton.types import RequestId, TokenEvent
from benchmarks.support.streams import Load, Measured, StreamTimes
from generate_workers.config import EngineConfig
from generate_workers.engine.chunked_prefill import ChunkedPrefillPolicy
from generate_workers.engine.core import GenerationEngine
from generate_workers.engine.memory_limits import make_memory
from generate_workers.engine.preemption import RunningRows
from generate_workers.engine.rows import GenerationRequest
from generate_workers.engine.served_model import ServedModel
from generate_workers.slots.table import SlotTable
from generate_workers.speculation.making import make_speculation

_END_S = 10.0


@dataclass(frozen=True)
class EngineSpec:
    """Arguments of the bare engine's process. The engine has the same configuration as a cluster's generation group."""

    folder: Path
    dtype: str
    num_threads: int
    cores: tuple[int, ...]
    """Cores that the process is pinned to. Empty: not pinned."""
    config: EngineConfig


class EngineSide:
    """Connection to a bare engine (a GenerationEngine without gRPC and Ray) in a separate process. The engine is one
    side of a comparison: one of the systems that a benchmark compares (`benchmarks.support.streams`)."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    async def measure(self, load: Load) -> Measured:
        self._pipe.send(load)
        measured = await asyncio.to_thread(self._pipe.recv)
        assert isinstance(measured, Measured)
        return measured


@contextlib.asynccontextmanager
async def engine_alone(spec: EngineSpec) -> AsyncIterator[EngineSide]:
    """Context manager. Start a bare engine (a GenerationEngine without gRPC and Ray) in a separate process, and yield
    the connection to it when it is ready. The process ends with the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, spec), daemon=True)
    process.start()
    theirs.close()  # so that `recv` on our end fails when the process dies
    try:
        await asyncio.to_thread(ours.recv)
        yield EngineSide(ours)
    finally:
        ours.close()  # this ends the process's loop
        process.join(_END_S)
        process.kill()


class _Collector:
    """Collects the times of one stream's tokens. The engine's thread calls `take` for each token."""

    def __init__(self) -> None:
        self.asked_ns = time_ns()
        self.ended = threading.Event()
        self._token_ns: list[int] = []
        self._first_ns = 0

    def take(self, event: TokenEvent) -> None:
        if event.token is not None:
            self._first_ns = self._first_ns or time_ns()
            self._token_ns.append(event.unix_ns)
        if event.finish is not None:
            assert not event.error, event.error
            self.ended.set()

    def times(self) -> StreamTimes:
        self.ended.wait()
        return StreamTimes(self.asked_ns, self._first_ns, tuple(self._token_ns))


def _run(pipe: Connection, spec: EngineSpec) -> None:
    """Run the engine's process: serve loads until the pipe is closed."""
    use_cores(spec.cores, spec.num_threads)
    decoder = asyncio.run(in_own_thread(partial(load_decoder, spec.folder, dtype=spec.dtype)))
    config, clock = spec.config, SystemClock()
    most = min(config.max_slot_tokens, decoder.config.max_position)
    slots = SlotTable(make_memory(decoder, replace(config, max_slot_tokens=most)), clock, endpoint="none:0")
    model = ServedModel(decoder, Tokenizer.load(spec.folder))
    scheduling_policy = ChunkedPrefillPolicy.of(config, model)
    running = RunningRows(slots, scheduling_policy, make_speculation(model, slots, config))
    engine = GenerationEngine(model, running, config)
    engine.start()
    collect_rarely()
    pipe.send("ready")
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        for load in iter(pipe.recv, None):
            pipe.send(_answer(engine, load))
    engine.close()


def _answer(engine: GenerationEngine, load: Load) -> Measured:
    params = SamplingParams(max_tokens=load.max_tokens, ignore_eos=True)
    collectors = []
    for index, prompt in enumerate(load.prompts):
        collector = _Collector()
        engine.submit(GenerationRequest(RequestId(f"stream-{index}"), prompt, (), params), collector.take)
        collectors.append(collector)
    return Measured(tuple([collector.times() for collector in collectors]))
