"""Measures decode steps of an engine with paged KV, with and without CUDA graphs. Computes the minimum time to read the
bytes of a step."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton.modeling.device.port import Device
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.sampling import SamplerState, sample
from baton.modeling.forward.step_graphs import StepGraphs
from baton.modeling.forward.triton.step_inputs import StepShape, StepTokens
from baton.modeling.kv.pages import PAGE_TOKENS, PageSpan
from baton.sampling_params import SamplingParams
from baton.types import SlotId, TokenRange
from benchmarks.device.rates import times_s
from generate_workers.residency.paged import PagedResidency
from generate_workers.residency.port import KvShape

_STEPS = 10
_GREEDY = SamplingParams()


@dataclass(frozen=True)
class StepTimes:
    """Measured times of one combination of batch size and context length, in milliseconds."""

    graphs_ms: list[float]
    """Milliseconds of steps that StepGraphs runs. On a GPU, StepGraphs replays a CUDA graph of the forward pass and of
    sampling. On a CPU, it launches the same kernels one by one."""
    launched_ms: list[float]
    """Milliseconds of steps whose kernels are launched one by one, as in an engine without CUDA graphs. A step is a
    forward pass, then sampling."""
    num_bytes: int
    """Number of bytes that a step reads: all weights except the embedding, and the KV of all sequences."""


class PagedRows:
    """Batch of sequences with paged KV in device memory. Its steps run as in `generate_workers.engine.model_runner`."""

    def __init__(self, decoder: Decoder, residency: PagedResidency, batch: int, context: int, most_tokens: int) -> None:
        """Open `batch` sequences with random KV of `context` tokens each. Reserve KV for up to `most_tokens` tokens per
        sequence."""
        self._decoder, self._residency, self._lengths = decoder, residency, [context] * batch
        for slot in range(batch):
            residency.open(SlotId(slot), context, most_tokens).commit(TokenRange(0, context))
        data_LPS2GH = residency.pool.memory.data_LPS2GH
        data_LPS2GH.normal_()
        row_pages = -(-most_tokens // PAGE_TOKENS)
        shape = StepShape(batch, batch, batch, 1, batch)
        self._graphs = StepGraphs(decoder, data_LPS2GH, row_pages, [shape], captures=data_LPS2GH.is_cuda)
        self._states = [SamplerState(_GREEDY, [1])] * batch

    @torch.inference_mode()
    def step(self, *, graphs: bool) -> None:
        """Run one decode step, which yields one new token per sequence, and copy the tokens to the host. If `graphs` is
        true, StepGraphs runs the step; on a GPU, it replays a CUDA graph of the forward pass and of sampling. If
        `graphs` is false, the kernels of the step are launched one by one."""
        rows = [(SlotId(slot), TokenRange(length, length + 1)) for slot, length in enumerate(self._lengths)]
        with self._residency.step(rows) as step:
            if graphs:
                num_rows = len(rows)
                draws = [draw for state in self._states if (draw := state.row_draw()) is not None]
                tokens = StepTokens([1] * num_rows, [-1] * num_rows, self._lengths, range(num_rows), draws)
                spans = [span for span in step.spans if isinstance(span, PageSpan)]
                self._graphs.launch(tokens, spans).result()
            else:
                hidden_TD = self._decoder.forward([1] * len(rows), step.spans)
                sample(self._decoder.logits(hidden_TD), self._states)
        self._lengths = [length + 1 for length in self._lengths]


def measure(decoder: Decoder, device: Device, batch: int, context: int, rounds: int) -> StepTimes:
    """Measure greedy decode steps of `batch` sequences with random KV. `context` is the initial number of tokens per
    sequence."""
    num_steps = rounds * _STEPS + 1  # each kind of run has one warm-up step
    most_tokens = context + 2 * num_steps
    shape = KvShape(decoder.layout, decoder.config.windows, batch, most_tokens)
    with contextlib.closing(PagedResidency(shape, device)) as residency:
        rows = PagedRows(decoder, residency, batch, context, most_tokens)

        def way(graphs: bool) -> Callable[[], None]:
            return lambda: rows.step(graphs=graphs)

        graphs_ms, launched_ms = (
            [1e3 * s for s in times_s(device, way(graphs), rounds, _STEPS)] for graphs in (True, False)
        )
    num_bytes = _weight_bytes(decoder) + int(batch * (context + num_steps) * decoder.layout.token_bytes)
    return StepTimes(graphs_ms, launched_ms, num_bytes)


def roofline_ms(times: StepTimes, rate: float) -> float:
    """Return the minimum milliseconds of a step: the time to read the step's bytes at `rate` bytes per second."""
    return 1e3 * times.num_bytes / rate


def _weight_bytes(decoder: Decoder) -> int:
    config, size = decoder.config, decoder.dtype.itemsize
    heads = config.num_heads + config.num_kv_heads
    layer = config.hidden_size * (2 * heads * config.head_dim + 3 * config.intermediate_size)
    return size * (config.num_layers * layer + config.vocab_size * config.hidden_size)
