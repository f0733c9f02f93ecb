"""Generation engine with running sequences. Their KV was pushed to leased slots in the same way as a prefill group
pushes KV.

A measured step therefore includes all work of a step for served requests: the residency policy's memory, batching,
sampling, text and events. Only the content is artificial: the KV is random, and all prompt tokens are the same token.
Must be used only by the thread that creates it.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from baton.errors import InvalidArgumentError, ResourceExhaustedError
from baton.modeling.forward.decoder import Decoder
from baton.modeling.kv.buffers import KvBuffer
from baton.process.clock import SystemClock
from baton.sampling_params import SamplingParams
from baton.text.tokenizer import Tokenizer
from baton.transport.kv_sink import ReserveSpec
from baton.types import Lease, RequestId, SampledToken, TokenRange
from generate_workers.config import EngineConfig
from generate_workers.engine.chunked_prefill import ChunkedPrefillPolicy
from generate_workers.engine.core import GenerationEngine
from generate_workers.engine.memory_limits import make_memory
from generate_workers.engine.preemption import RunningRows
from generate_workers.engine.rows import GenerationRequest
from generate_workers.engine.served_model import ServedModel
from generate_workers.engine.status import StepStats
from generate_workers.slots.table import SlotTable

_TTL_S = 3600.0
_SPREAD = 0.1


def row_lengths(batch: int, context: int, less: int = 0) -> list[int]:
    """Return the lengths of `batch` sequences in tokens: from 10 % below to 10 % above `context`, evenly spread, each
    minus `less`."""
    shares = [(2 * row + 1) / batch - 1 for row in range(batch)]
    return [max(1, round(context * (1 + _SPREAD * share)) - less) for share in shares]


class EngineRows:
    """Generation engine with running sequences. Create with `running`."""

    def __init__(self, engine: GenerationEngine, num_rows: int) -> None:
        self._engine = engine
        self._num_rows = num_rows

    @classmethod
    @contextlib.contextmanager
    def running(
        cls, decoder: Decoder, folder: Path, lengths: Sequence[int], max_steps: int, config: EngineConfig
    ) -> Iterator["EngineRows"]:
        """Context manager. Create an engine with one sequence for each of `lengths`, in tokens, and yield it. Each
        sequence can run `max_steps` steps. The engine is closed on exit. Raises InvalidArgumentError or
        ResourceExhaustedError if the KV does not fit."""
        clock = SystemClock()
        slots = SlotTable(make_memory(decoder, config), clock, endpoint="none:0")
        model = ServedModel(decoder, Tokenizer.load(folder))
        running = RunningRows(slots, ChunkedPrefillPolicy.of(config, model))
        engine = GenerationEngine(model, running, config)
        params = SamplingParams(max_tokens=max_steps + 1, temperature=0, ignore_eos=True)
        source = KvBuffer(decoder.layout, TokenRange(0, max(lengths)))
        source.data.normal_()
        try:
            for number, length in enumerate(lengths):
                name = RequestId(f"row-{number}")
                lease = slots.reserve(ReserveSpec(name, 1, length, length + params.max_tokens, _TTL_S))
                _push(slots, lease, source)
                request = GenerationRequest(name, (1,) * length, (), params, lease.ref)
                engine.submit(request, lambda event: None)
            yield cls(engine, len(lengths))
        finally:
            engine.close()

    def step_ms(self, num_steps: int) -> float:
        """Return the mean milliseconds of `num_steps` steps, after one warm-up step."""
        with torch.inference_mode():
            self._engine.step()
            start_s = time.perf_counter()
            for _ in range(num_steps):
                self._engine.step()
            elapsed_s = time.perf_counter() - start_s
        assert self.last.num_decode_rows == self._num_rows, self.last
        return elapsed_s / num_steps * 1e3

    @property
    def last(self) -> StepStats:
        """Statistics of the engine's last step."""
        stats = self._engine.status().last_step
        assert stats is not None
        return stats


def num_rows_that_fit(decoder: Decoder, length: int, config: EngineConfig) -> tuple[int, str]:
    """Open sequences of `length` tokens, each with memory for one more token, until the engine refuses one. Return the
    number of open sequences and the reason of the refusal. The reason is empty if all slots are used."""
    memory = make_memory(decoder, config)
    slots = SlotTable(memory, SystemClock(), endpoint="none:0")
    try:
        for number in range(config.num_slots):
            try:
                slots.reserve(ReserveSpec(RequestId(f"row-{number}"), 1, length, length + 1, _TTL_S))
            except (InvalidArgumentError, ResourceExhaustedError) as error:
                return number, str(error)
        return config.num_slots, ""
    finally:
        memory.residency.close()


def _push(slots: SlotTable, lease: Lease, source: KvBuffer) -> None:
    """Push all KV of a lease, copied from the first tokens of `source`, and commit it with a first token."""
    tokens = TokenRange(0, lease.num_tokens)
    with slots.open_push(lease.ref) as target:
        for layer in range(slots.layout.num_layers):
            target.copy_in(layer, tokens, source.export(layer, tokens))
        target.drain()
    asyncio.run(slots.commit(lease.ref, [SampledToken(1)]))
