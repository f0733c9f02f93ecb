"""What this machine reaches at what a generation step is made of, measured in a few seconds (`baton plan --hardware
here`, `baton doctor`).

The decoder itself is what is measured: one of the model's shape with random weights, and no more layers than it takes
to be out of the caches' reach. From a few of its steps follow the numbers that `planning.study.roofline` predicts all
others from; no number is fitted to a step that is to be predicted. Blocks, and takes all threads; the machine should be
idle.
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
from baton.types import TokenRange
from generate_workers.engine.step_runner import bytes_per_step
from modeling.checkpoints.weights import load_decoder
from modeling.forward.decoder import Decoder
from modeling.kv.buffers import TORCH_DTYPES, BufferSpan, KvBuffer
from planning.model_shape import ModelShape
from planning.study.chips import Chip

_READ_BYTES = 2**28
_OUT_OF_CACHE_BYTES = 2**28
_ROUNDS = 7
_ENOUGH_S = 4.0
"""No further round after so long."""
_ROWS = (1, 40, 80)
"""Of the steps whose KV is next to nothing: bound by reading, and by computing; more if that takes more."""
_MOST_ROWS = 640
_COMPUTING = 0.75
"""The part of a step that goes by rows from which on computing is what bounds it."""
_KV_BYTES = 2**28
_KV_ROWS = 8
_BUSY_SPREAD = 1.3
_COPIES = 3
"""Of the probe's weights that are held at once while they are made and loaded."""


@dataclass(frozen=True)
class Measured:
    """What the probe found."""

    chip: Chip
    spread: float
    """How many times its fastest repeat a probe's median took, at most over all probes."""
    is_bound: bool = True
    """Whether computing bounded a step at all: else FLOP/s are at least the chip's."""

    @property
    def doubt(self) -> str:
        """Why the numbers may be too low, and what to do; empty when there is no reason to think so."""
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
    """Median seconds of steps of the probe's model."""

    by_rows: dict[int, float]
    """Whose rows have one token of context."""
    long_s: float
    """Of _KV_ROWS rows that read `long_bytes` of KV."""
    short_s: float
    """Of as many rows that read next to nothing."""
    long_bytes: float
    num_layers: int
    num_params: float
    weight_bytes: float
    """Of all of them."""

    @property
    def is_bound(self) -> bool:
        """Whether computing bounds the step of most rows."""
        return computing_share(self.by_rows) >= _COMPUTING


def measure(
    shape: ModelShape, dtype: str, num_threads: int, memory_bytes: float, *, quantization: str = "none"
) -> Measured:
    """This machine, generating with `num_threads` threads and `memory_bytes` for weights and KV. Raises ConfigError
    when that, or the disk, does not hold the probe's model, and what `load_decoder` raises."""
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
            return Measured(chip, clock.spread, steps.is_bound)
    finally:
        torch.set_num_threads(before)


def chip_from(steps: Steps, bandwidth: float, memory_bytes: float) -> Chip:
    """The numbers of a machine on which the probe took so long.

    FLOP/s are what a row more costs where many are computed, or a bound where reading hides it; what a step of one row
    takes beyond reading is its layers' own; how much of the reading shows in a step of many rows says how well it
    hides.
    """
    one, *_, some, many = sorted(steps.by_rows)
    row_s = steps.by_rows[many] / many
    if steps.is_bound:
        row_s *= computing_share(steps.by_rows)
    kv_s = steps.long_s - steps.short_s
    if kv_s <= 0:  # only noise makes it so: what is left is a bound
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
    """The part of the step of most rows that goes by rows, as it differs from the next smaller: next to nothing where
    reading hides what is computed."""
    *_, some, many = sorted(by_rows)
    return (by_rows[many] - by_rows[some]) / (many - some) * many / by_rows[many]


def with_more_rows(by_rows: dict[int, float], times: Callable[[Sequence[int]], Sequence[float]]) -> dict[int, float]:
    """Doubles the rows until computing bounds the step of most, or there are many; `times` are the median seconds of
    steps of so many rows."""
    while computing_share(by_rows) < _COMPUTING and max(by_rows) < _MOST_ROWS:
        pair = max(by_rows), 2 * max(by_rows)  # both at one time, so that a passing disturbance hits both
        by_rows = by_rows | dict(zip(pair, times(pair), strict=True))
    return by_rows


class Stopwatch:
    """Times calls, and notes how evenly they go."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self.spread = 1.0
        self._now_s = now_s

    def times(self, calls: Sequence[Callable[[], object]]) -> list[list[float]]:
        """Seconds that each call took in several rounds, ascending. In a round each is called twice, and the second
        time counts: with its own data in the caches as far as they hold it. So a passing disturbance hits all alike."""
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
    """Bytes a second that all threads together read from memory: the best of several times."""
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
    """Of the probe's model."""
    return min(shape.num_layers, -(-_OUT_OF_CACHE_BYTES // (shape.layer_weights * shape.dtype_bytes)))


def _step(decoder: Decoder, rows: int, context: int) -> Callable[[], object]:
    """A step of `rows` rows, each with `context` tokens before it."""
    buffers = [KvBuffer(decoder.layout, TokenRange(0, context + 1)) for _ in range(rows)]
    for buffer in buffers:
        buffer.data.fill_(0.5)  # memory that was never written may be one page of zeros
    spans = [BufferSpan(buffer, TokenRange(context, context + 1)) for buffer in buffers]
    return lambda: decoder.logits(decoder.forward([1] * rows, spans)).argmax(-1)


def _write_model(folder: Path, shape: ModelShape, dtype: str, num_layers: int) -> None:
    """A model folder of the Llama family. A feed-forward part without a gate becomes one of as many weights."""
    ffn = shape.ffn if shape.gated else -(-2 * shape.ffn // 3)
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
    """Random numbers that leave the sums of a matrix product at about 1."""
    return torch.randn(size).mul_(size[1] ** -0.5).to(dtype)
