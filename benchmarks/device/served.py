"""Runs a generation engine in this process for a fixed number of users. Each user sends the next request when the
previous one has been answered (closed loop). Measures the duration of every step, and how many seconds of the step are
spent on scheduling, on speculation and on the device.

The engine is configured like a worker in a cluster without prefill groups, with the same scheduling policy, speculation
and CUDA graphs. Its streams are read on the process's asyncio loop. It runs without Ray and gRPC, so the costs of Ray
and gRPC are not included.
"""

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from baton.errors import BatonError
from baton.modeling.forward.decoder import Decoder
from baton.modeling.prefix_store.store import Filled
from baton.process.clock import SystemClock
from baton.sampling_params import SamplingParams
from baton.text.tokenizer import Tokenizer
from baton.types import RequestId, StreamNumber, TokenEvent
from generate_workers.compiling import compile_steps
from generate_workers.config import EngineConfig
from generate_workers.engine.chunked_prefill import ChunkedPrefillPolicy
from generate_workers.engine.core import GenerationEngine
from generate_workers.engine.device_steps import make_device_steps
from generate_workers.engine.memory_limits import make_memory
from generate_workers.engine.preemption import RunningRows
from generate_workers.engine.rows import GenerationRequest
from generate_workers.engine.served_model import ServedModel
from generate_workers.slots.table import SlotTable
from generate_workers.speculation.making import make_speculation
from generate_workers.streams.open_streams import OpenStreams
from generate_workers.streams.shared_reader import SharedReader
from tests.support.models.tiny_tokenizer import write_letters

TOGETHER: dict[str, Any] = {"max_batched_tokens": 2048, "step_budget_s": 0.3}
"""Settings of a GPU engine in a cluster without prefill groups, where the engine computes all prefills. The values are
those of `deploy.machine.arrangement`."""
ENGINE_THREAD = "generate-engine"
_KEEP_S = 60.0


@dataclass(frozen=True)
class Load:
    """Load by a fixed number of users. Each user sends its next request when its previous request has been answered
    (closed loop)."""

    users: int
    prompt_tokens: int
    """Mean number of tokens of a prompt. The actual lengths vary by up to 2 %."""
    output_tokens: int
    rounds: int
    """Number of requests that each user sends."""


@dataclass(frozen=True)
class Step:
    """One step of the engine. Times are in seconds."""

    at_s: float
    """Seconds from the start of the load to the start of the step."""
    took_s: float
    num_rows: int
    """Number of sequences that decode in the step."""
    num_prefill_tokens: int
    num_drafts: int
    num_bytes: int
    """Number of bytes of weights and KV that the step read."""
    device_s: float
    """Seconds in which the engine's thread launched a step whose forward pass and sampling run without the host (on a
    GPU: a replayed CUDA graph), or waited for the tokens of the step launched before it. 0 for other steps."""
    draft_s: float
    """Seconds spent on speculation: planning drafts, generating them, and updating the drafter with the results."""
    batch_s: float
    """Seconds spent on scheduling: selecting the sequences and prompt tokens of the step."""


@dataclass
class Served:
    """Results of running one load."""

    load: Load
    began_s: float = field(default_factory=time.perf_counter)
    took_s: float = 0.0
    num_tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    """Time to first token of each request, in seconds."""
    gap_s: list[float] = field(default_factory=list)
    """Times between consecutive tokens of a stream in seconds, for all streams."""
    steps: list[Step] = field(default_factory=list)


class Timed:
    """Wrapper that measures the total time of all calls to the methods of another object."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._seconds = inner, 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self.timed(found) if callable(found) else found

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `function` and measures the time of the call."""

        def call(*args: Any, **options: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self._seconds += time.perf_counter() - began_s

        return call

    def take(self) -> float:
        """Return the total seconds of all calls to the wrapped object since the previous `take`, and reset them."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class TimedSteps(Timed):
    """Timed wrapper of StepGraphs. The time in which the engine waits for tokens counts, too."""

    def launch(self, *step: Any) -> Any:
        """Launch a step, and return its tokens."""
        tokens = self.timed(self._inner.launch)(*step)
        vars(tokens)["result"] = self.timed(tokens.result)
        return tokens


class LoggedEngine(GenerationEngine):
    """Generation engine that records the times and sizes of each of its steps."""

    def __init__(self, model: ServedModel, running: RunningRows, config: EngineConfig, *, device_steps: Any) -> None:
        self._batching: Any = Timed(running.scheduling_policy)
        self._drafting: Any = Timed(running.speculation)
        self._on_device = TimedSteps(device_steps)
        timed_steps: Any = None if device_steps is None else self._on_device
        running.scheduling_policy = self._batching
        if running.speculation is not None:
            running.speculation = self._drafting
        super().__init__(model, running, config, device_steps=timed_steps)
        self.log: list[Step] = []

    def step(self) -> None:
        """Run one engine step, and record it if the engine had work."""
        before, began_s = self._pipeline.last_step, time.perf_counter()
        super().step()
        took_s, last = time.perf_counter() - began_s, self._pipeline.last_step
        parts = self._on_device.take(), self._drafting.take(), self._batching.take()
        if last is not None and last is not before:
            numbers = last.num_decode_rows, last.num_prefill_tokens, last.num_drafts, last.num_bytes
            self.log.append(Step(began_s, took_s, *numbers, *parts))


@contextlib.contextmanager
def running_engine(decoder: Decoder, config: EngineConfig) -> Iterator[LoggedEngine]:
    """Context manager. Start an engine as a worker does, with a tokenizer whose tokens are single letters, and yield
    it. The engine is closed on exit."""
    clock = SystemClock()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer.load(write_letters(Path(folder), decoder.config.vocab_size))
    memory = make_memory(decoder, config)
    slots = SlotTable(memory, clock, endpoint="none:0")
    model = ServedModel(decoder, tokenizer)
    scheduling_policy = ChunkedPrefillPolicy.of(config, model)
    compile_steps(decoder, memory.residency, config)
    device_steps = make_device_steps(decoder, memory.residency, config, clock)
    drafting = make_speculation(model, slots, config, device_steps=device_steps)
    running = RunningRows(slots, scheduling_policy, drafting)
    engine = LoggedEngine(model, running, config, device_steps=device_steps)
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


def serve(engine: LoggedEngine, load: Load, limit_s: float, observe: Callable[[], None] | None = None) -> Served:
    """Run a load for at most `limit_s` seconds, and return its results. If `observe` is given, call it in a thread
    during the load. Blocks."""
    served = Served(load)
    engine.log.clear()
    with contextlib.suppress(TimeoutError):
        asyncio.run(_bear(engine, load, served, limit_s, observe))
    served.took_s = time.perf_counter() - served.began_s
    served.steps = [replace(step, at_s=step.at_s - served.began_s) for step in engine.log]
    return served


async def _bear(
    engine: LoggedEngine, load: Load, served: Served, limit_s: float, observe: Callable[[], None] | None
) -> None:
    streams = OpenStreams(engine)
    reader: SharedReader[tuple[StreamNumber, float, TokenEvent | Filled | BatonError | None]]
    reader = SharedReader(streams, _stamped, _stamped)
    rng, num_asked, num_requests = random.Random(1), 0, load.users * load.rounds
    latest_s = dict[StreamNumber, float]()
    is_first = set[StreamNumber]()

    def ask() -> None:
        nonlocal num_asked
        num_asked += 1
        number, num_tokens = StreamNumber(num_asked), round(load.prompt_tokens * rng.uniform(0.98, 1.02))
        prompt = tuple(rng.randrange(90) for _ in range(num_tokens))
        params = SamplingParams(max_tokens=load.output_tokens, temperature=0, ignore_eos=True)
        request = GenerationRequest(RequestId(f"request-{number}"), prompt, (), params)
        latest_s[number] = time.perf_counter()
        is_first.add(number)
        reader.add(number, lambda on_message: streams.open(request, number, _KEEP_S, on_message))
        if num_asked == num_requests:
            reader.complete()

    for _ in range(load.users):
        ask()
    watching = asyncio.create_task(asyncio.to_thread(observe or (lambda: None)))
    try:
        async with asyncio.timeout(limit_s), contextlib.aclosing(reader.batches()) as batches:
            async for batch in batches:
                for number, now_s, event in batch:
                    if isinstance(event, TokenEvent):
                        (served.first_s if number in is_first else served.gap_s).append(now_s - latest_s[number])
                        is_first.discard(number)
                        latest_s[number] = now_s
                        served.num_tokens += event.token is not None
                        continue
                    if isinstance(event, BatonError):
                        raise event
                    reader.leave(number)
                    if num_asked < num_requests:
                        ask()
    finally:
        reader.close()
        for number in latest_s:
            streams.cancel(number)
        await watching


def _stamped(number: StreamNumber, event: Any) -> tuple[StreamNumber, float, Any]:
    return number, time.perf_counter(), event
