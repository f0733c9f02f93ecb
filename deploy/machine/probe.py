"""Measures the rates of this machine that bound a generation step (`baton plan --hardware here`, `baton doctor`).

The probe is a decoder of the model's shape with random weights. It has just enough layers to exceed the processor's
caches. A few steps of the probe are timed, and the rates are computed from their times. `baton_lab.study.roofline`
predicts other steps from these rates. A step that is predicted is never used to compute the rates. Measuring blocks and
uses all configured threads. The machine should be idle.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from baton.errors import ConfigError
from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.weight_sizes import bytes_per_step
from baton.modeling.kv.buffers import TORCH_DTYPES, BufferSpan, KvBuffer
from baton.planning.chips import Chip
from baton.planning.model_shape import ModelShape
from baton.types import TokenRange

_READ_BYTES = 2**28
_OUT_OF_CACHE_BYTES = 2**28
_ROUNDS = 7
_ENOUGH_S = 4.0
"""Time limit in seconds for repeated measurements. After this time no further round of measurements starts."""
_ROWS = (1, 40, 80)
"""Batch sizes, in sequences, of the timed steps with almost no KV. The time of a small step is bound by reading the
weights, and the time of a large step by computing. If the largest of these steps is not bound by computing, larger
batches are timed too."""
_MOST_ROWS = 640
_COMPUTING = 0.75
"""A step counts as bound by computing if at least this fraction of its time grows with the number of sequences."""
_KV_BYTES = 2**28
_KV_ROWS = 8
_BUSY_SPREAD = 1.3
_COPIES = 3
"""Maximum number of copies of the probe's weights in memory at the same time. This maximum is reached while the probe
is made and loaded."""


@dataclass(frozen=True)
class MeasuredRates:
    """Rates of this machine that the probe measured, and whether they can be trusted."""

    chip: Chip
    spread: float
    """Largest ratio, over all timed functions, of the median duration to the shortest duration. 1: all repeats took
    equally long."""
    is_bound: bool = True
    """True if the measured step with the most sequences was bound by computing, not by reading memory. If false, the
    measured FLOP/s are only a lower bound."""

    @property
    def doubt(self) -> str:
        """Reason why the rates may be too low, and the remedy; empty if there is no reason to doubt them."""
        doubts = []
        if not self.is_bound:
            doubts.append(f"FLOP/s are at least that: steps of {_MOST_ROWS} rows are still bound by reading")
        if self.spread > _BUSY_SPREAD:
            doubts.append(
                f"repeats differ {self.spread:.1f} times: this machine is busy; measure again when it is idle"
            )
        return "; ".join(doubts)


@dataclass(frozen=True)
class Steps:
    """Median durations, in seconds, of the probe's steps, and the sizes of the probe's model."""

    by_rows: dict[int, float]
    """Seconds of steps by number of sequences; each sequence has one token of context."""
    long_s: float
    """Seconds of a step of `_KV_ROWS` sequences with a long context, which reads `long_bytes` of KV."""
    short_s: float
    """Seconds of a step of `_KV_ROWS` sequences with a context of one token, which reads almost no KV."""
    long_bytes: float
    num_layers: int
    num_params: float
    weight_bytes: float
    """Bytes of all weights that a step reads."""

    @property
    def is_bound(self) -> bool:
        """True if the step with the most sequences is bound by computing, not by reading memory."""
        return computing_share(self.by_rows) >= _COMPUTING


def measure(
    shape: ModelShape, dtype: str, num_threads: int, memory_bytes: float, *, weights: str = "stored"
) -> MeasuredRates:
    """Measure the rates of this machine for generation with `num_threads` threads. `memory_bytes` is the memory for
    weights and KV. Raises ConfigError if the probe's model does not fit in memory or on the disk, and the errors of
    `load_decoder`."""
    probe_bytes = (_num_layers(shape) * shape.layer_weights + shape.hidden * shape.vocab) * shape.dtype_bytes
    if _COPIES * probe_bytes + _KV_BYTES > memory_bytes:
        needed, there = _COPIES * probe_bytes + _KV_BYTES, memory_bytes
        raise ConfigError(f"measuring takes {needed / 1e9:.1f} GB of memory, {there / 1e9:.1f} are free: free some")
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with torch.inference_mode():
            clock = Stopwatch()
            steps = _steps(shape, dtype, weights, clock)
            chip = chip_from(steps, read_rate(clock), memory_bytes)
            return MeasuredRates(chip, clock.spread, steps.is_bound)
    finally:
        torch.set_num_threads(before)


def chip_from(steps: Steps, bandwidth: float, memory_bytes: float) -> Chip:
    """Return the rates of the machine that ran the probe, computed from the times of its steps. `bandwidth` is the
    measured memory bandwidth in bytes per second.

    FLOP/s follow from the time that one further sequence adds to a large step. If the large step is bound by reading
    memory, the FLOP/s are only a lower bound. The overhead of the layers is the time of a step of one sequence, minus
    the time to read the weights and the time to compute.

    The overlap is the degree to which reading the weights and computing happen at the same time. It is a fraction of
    the shorter of the two times: 0 if they do not overlap, 1 if the shorter one overlaps completely. It is computed
    from the second-largest step. The overhead and the time to compute are subtracted from the time of this step. The
    remaining time is reading that did not overlap with computing.
    """
    one, *_, some, many = sorted(steps.by_rows)
    row_s = steps.by_rows[many] / many
    if steps.is_bound:
        row_s *= computing_share(steps.by_rows)
    kv_s = steps.long_s - steps.short_s
    if kv_s <= 0:  # noise can make it negative: use a bound instead
        kv_s = steps.long_s
    read_s = steps.weight_bytes / bandwidth
    calls_s = max(steps.by_rows[one] - read_s - row_s, 0.0)
    shown_s = steps.by_rows[some] - calls_s - some * row_s
    return Chip(
        flops=2 * steps.num_params / row_s,
        memory_bandwidth=bandwidth,
        memory_bytes=memory_bytes,
        kv_bandwidth=steps.long_bytes / kv_s,
        overlap=1 - min(max(shown_s / min(read_s, some * row_s), 0.0), 1.0),
        layer_s=calls_s / steps.num_layers,
    )


def computing_share(by_rows: dict[int, float]) -> float:
    """Return the fraction of a step's time that grows with the number of sequences, for the step with the most
    sequences. `by_rows` has the seconds of steps by number of sequences. The fraction is computed from the two steps
    with the most sequences. It is almost 0 if the step with the most sequences is bound by reading memory."""
    *_, some, many = sorted(by_rows)
    return (by_rows[many] - by_rows[some]) / (many - some) * many / by_rows[many]


def with_more_rows(by_rows: dict[int, float], times: Callable[[Sequence[int]], Sequence[float]]) -> dict[int, float]:
    """Measure larger steps. Start with twice as many sequences as the largest step in `by_rows`, and double the number
    for each further step. The largest step so far is measured again together with each new one. Stop when the largest
    step is bound by computing, or when it has at least `_MOST_ROWS` sequences. Return the seconds of all steps by
    number of sequences, including those in `by_rows`. `times` is a function that returns the median seconds of steps
    with the given numbers of sequences."""
    while computing_share(by_rows) < _COMPUTING and max(by_rows) < _MOST_ROWS:
        pair = max(by_rows), 2 * max(by_rows)  # measured together, so that a passing disturbance hits both
        by_rows = by_rows | dict(zip(pair, times(pair), strict=True))
    return by_rows


class Stopwatch:
    """Timer that calls functions repeatedly, and records in `spread` how much the durations of the repeats differ."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self.spread = 1.0
        self._now_s = now_s

    def times(self, calls: Sequence[Callable[[], object]]) -> list[list[float]]:
        """Call all functions in several rounds. Return, for each function, its durations in seconds in ascending order.
        In each round every function is called twice, and only the second call is timed, because the first call loads
        the function's data into the caches. Each round contains all functions, so that a short disturbance affects all
        of them."""
        times: list[list[float]] = [[] for _ in calls]
        began_s = self._now_s()
        while len(times[0]) < _ROUNDS and (not times[0] or self._now_s() < began_s + _ENOUGH_S):
            for call, taken in zip(calls, times, strict=True):
                call()
                start_s = self._now_s()
                call()
                taken.append(self._now_s() - start_s)
        for taken in times:
            taken.sort()
            self.spread = max(self.spread, statistics.median(taken) / taken[0])
        return times


def read_rate(clock: Stopwatch) -> float:
    """Return the rate in bytes per second at which all threads together read from memory. The rate is that of the
    fastest of several rounds."""
    data = torch.ones(_READ_BYTES // 4)
    return _READ_BYTES / clock.times([data.sum])[0][0]


def _steps(shape: ModelShape, dtype: str, weights: str, clock: Stopwatch) -> Steps:
    num_layers = _num_layers(shape)
    with tempfile.TemporaryDirectory(prefix="baton-probe-") as folder:
        write_model(Path(folder), shape, dtype, num_layers)
        decoder = load_decoder(Path(folder), dtype=dtype, weights=weights)
    context = max(64, _KV_BYTES // (_KV_ROWS * decoder.layout.token_bytes))
    sizes = [*((rows, 1) for rows in _ROWS), (_KV_ROWS, context), (_KV_ROWS, 1)]
    times = clock.times([_step(decoder, rows, tokens) for rows, tokens in sizes])
    *by_rows, long_s, short_s = map(statistics.median, times)

    def more(rows: Sequence[int]) -> list[float]:
        return [statistics.median(each) for each in clock.times([_step(decoder, num, 1) for num in rows])]

    return Steps(
        by_rows=with_more_rows(dict(zip(_ROWS, by_rows, strict=True)), more),
        long_s=long_s,
        short_s=short_s,
        long_bytes=_KV_ROWS * (context - 1) * decoder.layout.token_bytes,
        num_layers=num_layers,
        num_params=num_layers * shape.layer_weights + shape.hidden * shape.vocab,
        weight_bytes=bytes_per_step(decoder.weights),
    )


def _num_layers(shape: ModelShape) -> int:
    """Return the number of layers of the probe's model."""
    return min(shape.num_layers, -(-_OUT_OF_CACHE_BYTES // (shape.layer_weights * shape.dtype_bytes)))


def _step(decoder: Decoder, rows: int, context: int) -> Callable[[], object]:
    """Return a function that runs a step of `rows` sequences, each of which has `context` earlier tokens."""
    buffers = [KvBuffer(decoder.layout, TokenRange(0, context + 1)) for _ in range(rows)]
    for buffer in buffers:
        buffer.data.fill_(0.5)  # memory that was never written may be one page of zeros
    spans = [BufferSpan(buffer, TokenRange(context, context + 1)) for buffer in buffers]
    return lambda: decoder.logits(decoder.forward([1] * rows, spans)).argmax(-1)


def write_model(folder: Path, shape: ModelShape, dtype: str, num_layers: int) -> None:
    """Write a Llama model with random weights. A feed-forward part without a gate becomes a gated one with the same
    number of weights. The experts of a token become one feed-forward part with their total width."""
    ffn = shape.active_ffn if shape.gated else -(-2 * shape.active_ffn // 3)
    config = {
        "model_type": "llama",
        "num_hidden_layers": num_layers,
        "hidden_size": shape.hidden,
        "intermediate_size": ffn,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 2**17,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    try:
        save_file(dict(_tensors(shape, ffn, num_layers, TORCH_DTYPES[dtype])), folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder}: the probe's model cannot be written ({error}): free disk space") from error


def _tensors(shape: ModelShape, ffn: int, num_layers: int, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    matrices = {
        "self_attn.q_proj": (heads, shape.hidden),
        "self_attn.k_proj": (kv_heads, shape.hidden),
        "self_attn.v_proj": (kv_heads, shape.hidden),
        "self_attn.o_proj": (shape.hidden, heads),
        "mlp.gate_proj": (ffn, shape.hidden),
        "mlp.up_proj": (ffn, shape.hidden),
        "mlp.down_proj": (shape.hidden, ffn),
    }
    layer = {f"{name}.weight": _noise(size, dtype) for name, size in matrices.items()}
    layer |= {f"{name}_layernorm.weight": torch.ones(shape.hidden) for name in ("input", "post_attention")}
    ends = [
        ("model.embed_tokens.weight", _noise((shape.vocab, shape.hidden), dtype)),
        ("model.norm.weight", torch.ones(shape.hidden)),
    ]
    layers = [
        (f"model.layers.{at}.{name}", weight.clone()) for at in range(num_layers) for name, weight in layer.items()
    ]
    return ends + layers


def _noise(size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return random numbers that are small enough for the sums of a matrix product to be about 1."""
    return torch.randn(size).mul_(size[1] ** -0.5).to(dtype)
