"""Measures the rates of this machine that bound a generation step (`baton plan --hardware here`, `baton doctor`).

It measures the decoder itself: one of the model's shape with random weights, and just enough layers to exceed the
caches. The rates that `baton_lab.study.roofline` predicts other steps from follow from a few of its steps; no rate is
fitted to a step that is to be predicted. Blocks, and uses all configured threads; the machine should be idle.
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
"""Seconds after which no further round of measurements starts."""
_ROWS = (1, 40, 80)
"""Rows of the steps with next to no KV, from bound by reading to bound by computing; more are tried if necessary."""
_MOST_ROWS = 640
_COMPUTING = 0.75
"""Fraction of a step that must grow with rows for computing to count as its bound."""
_KV_BYTES = 2**28
_KV_ROWS = 8
_BUSY_SPREAD = 1.3
_COPIES = 3
"""Copies of the probe's weights that are in memory at the same time while they are made and loaded."""


@dataclass(frozen=True)
class MeasuredRates:
    """The rates that the probe measured."""

    chip: Chip
    spread: float
    """Ratio of median to fastest repeat, the largest of all measurements."""
    is_bound: bool = True
    """True if computing, not memory, bounded some step. If false, FLOP/s are only a lower bound."""

    @property
    def doubt(self) -> str:
        """Why the rates may be too low, and what to do; empty when there is no reason to doubt them."""
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
    """Median seconds of steps of the probe's model, and its sizes."""

    by_rows: dict[int, float]
    """Seconds of steps by number of rows; each row has one token of context."""
    long_s: float
    """Seconds of a step of _KV_ROWS rows that read `long_bytes` of KV."""
    short_s: float
    """Seconds of a step of _KV_ROWS rows that read next to no KV."""
    long_bytes: float
    num_layers: int
    num_params: float
    weight_bytes: float
    """Bytes of all weights that a step reads."""

    @property
    def is_bound(self) -> bool:
        """True if computing bounds the step with the most rows."""
        return computing_share(self.by_rows) >= _COMPUTING


def measure(
    shape: ModelShape, dtype: str, num_threads: int, memory_bytes: float, *, quantization: str = "none"
) -> MeasuredRates:
    """Measure this machine as it generates with `num_threads` threads and `memory_bytes` for weights and KV. Raises
    ConfigError when memory or disk does not hold the probe's model, and what `load_decoder` raises."""
    probe_bytes = (_num_layers(shape) * shape.layer_weights + shape.hidden * shape.vocab) * shape.dtype_bytes
    if _COPIES * probe_bytes + _KV_BYTES > memory_bytes:
        needed, there = _COPIES * probe_bytes + _KV_BYTES, memory_bytes
        raise ConfigError(f"measuring takes {needed / 1e9:.1f} GB of memory, {there / 1e9:.1f} are free: free some")
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with torch.inference_mode():
            clock = Stopwatch()
            steps = _steps(shape, dtype, quantization, clock)
            chip = chip_from(steps, read_rate(clock), memory_bytes)
            return MeasuredRates(chip, clock.spread, steps.is_bound)
    finally:
        torch.set_num_threads(before)


def chip_from(steps: Steps, bandwidth: float, memory_bytes: float) -> Chip:
    """Return the rates of a machine on which the probe's steps took this long.

    FLOP/s follow from the time of a further row where many are computed, or are a bound where reading hides that time.
    What a step of one row takes beyond reading is its layers' own time. How much of the reading shows in a step of many
    rows says how well it overlaps with computing.
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
    """Return the fraction of the step with the most rows that grows with rows, by the difference to the next smaller
    step; next to nothing where reading hides computing."""
    *_, some, many = sorted(by_rows)
    return (by_rows[many] - by_rows[some]) / (many - some) * many / by_rows[many]


def with_more_rows(by_rows: dict[int, float], times: Callable[[Sequence[int]], Sequence[float]]) -> dict[int, float]:
    """Measure with twice the rows, until computing bounds the largest step or it has _MOST_ROWS rows. `times` returns
    the median seconds of steps with these rows."""
    while computing_share(by_rows) < _COMPUTING and max(by_rows) < _MOST_ROWS:
        pair = max(by_rows), 2 * max(by_rows)  # measured together, so that a passing disturbance hits both
        by_rows = by_rows | dict(zip(pair, times(pair), strict=True))
    return by_rows


class Stopwatch:
    """Times calls, and records how much their repeats differ."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self.spread = 1.0
        self._now_s = now_s

    def times(self, calls: Sequence[Callable[[], object]]) -> list[list[float]]:
        """Return the seconds that each call took in several rounds, ascending. In a round each call is made twice, and
        the second is timed, with its own data in the caches; a passing disturbance hits all calls."""
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
    """Return the bytes a second that all threads together read from memory: the best of several rounds."""
    data = torch.ones(_READ_BYTES // 4)
    return _READ_BYTES / clock.times([data.sum])[0][0]


def _steps(shape: ModelShape, dtype: str, quantization: str, clock: Stopwatch) -> Steps:
    num_layers = _num_layers(shape)
    with tempfile.TemporaryDirectory(prefix="baton-probe-") as folder:
        _write_model(Path(folder), shape, dtype, num_layers)
        decoder = load_decoder(Path(folder), dtype=dtype, quantization=quantization)
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
    """Return a function that runs a step of `rows` rows, each with `context` tokens before it."""
    buffers = [KvBuffer(decoder.layout, TokenRange(0, context + 1)) for _ in range(rows)]
    for buffer in buffers:
        buffer.data.fill_(0.5)  # memory that was never written may be one page of zeros
    spans = [BufferSpan(buffer, TokenRange(context, context + 1)) for buffer in buffers]
    return lambda: decoder.logits(decoder.forward([1] * rows, spans)).argmax(-1)


def _write_model(folder: Path, shape: ModelShape, dtype: str, num_layers: int) -> None:
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
    """Return random numbers that keep the sums of a matrix product at about 1."""
    return torch.randn(size).mul_(size[1] ** -0.5).to(dtype)
