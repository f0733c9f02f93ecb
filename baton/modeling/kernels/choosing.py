"""Measures which kernels are the fastest for bfloat16 on this processor.

`kept_choice` runs the measurement once for each combination of processor type, torch version and kernel build. Linear
layers are measured with the shapes of a real layer (SmolLM2-135M) and with various numbers of rows (tokens), from a
generation step to a prefill chunk. Weights are read from memory, as in a model.

A comparison alternates runs of two candidates on one thread and measures the thread's processor time. It ends when a
sequential test decides (Wald, 1945). To be chosen, an alternative must be faster by the factor `MARGIN`.
"""

import itertools
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.modeling.kernels import native
from baton.modeling.kernels.calls.panels import bind_panels, pack_panels
from baton.modeling.kernels.processor import processor_kind
from baton.modeling.kernels.products import DOT, TILES, WIDENED
from baton.types import KernelChoice

logger = logging.getLogger(__name__)

MARGIN = 1.05
"""Factor by which an alternative kernel must be faster than the preferred kernel to be chosen in its place."""
ROWS = (1, 16, 32, 64, 128, 512)
"""Numbers of rows (tokens) with which linear layers are compared."""
_BATCH_ROWS = 32
"""Number of rows (tokens) with which the multiplication methods of the C++ kernels are compared."""
RATED_ROWS = (1, 8, 32, 128, 512)
"""Numbers of rows (tokens) that `linear_rates` measures. They represent one sequence, a small and a large batch, a
batch with drafts to verify, and a prompt."""
TORCH = "torch"
_BARE = 512
"""Number of rows and columns of the square matrices with which torch's matrix product is measured."""
_REPEATS = 3
_LEAD = 6
"""A comparison ends when one candidate has won this many more runs than the other. If the faster candidate wins three
of four runs, the decision is wrong once in 700 comparisons."""
_MOST_COMPARISONS = 61
_LEAST_ROWS = 64
"""Minimum number of rows that a timed run computes. If one call has fewer rows, the run consists of several calls."""
_NUM_LAYERS = 8
"""Number of layers of weights that a measurement uses. The weights take 57 MB, which is more than the cache that one
core of most processors can use."""
_HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM, _FFN = 576, 9, 3, 64, 1536
_QUERIES, _KEYS = 256, 1024

_EPS = 1e-5

_Run = Callable[[], object]
_Linear = Callable[[Tensor, Tensor | None], Tensor]
_Layer = Callable[[Tensor], None]


def measure_choice(*, tiles: bool = True) -> KernelChoice:
    """Measure the kernels on this processor and return the fastest choice. Takes a few seconds.

    If `tiles` is False, the C++ kernels are measured as on a processor without AMX. Torch's linear layers use AMX in
    either case. To prevent this, configure oneDNN in this process not to use AMX.
    """
    kind = processor_kind()
    if not native.load():
        return KernelChoice(kind, WIDENED, WIDENED, torch_rows=1)
    with _one_thread(), torch.inference_mode():
        if tiles and native.operators().has_tiles:
            attention = panels = TILES
        else:
            attention, panels = _choose_vectors(), _choose_panels()
        choice = KernelChoice(kind, attention, panels, _choose_torch_rows(panels))
    logger.info("kernels of %s: %s", kind, choice)
    return choice


def linear_rates() -> tuple[dict[str, list[float]], float]:
    """Measure the speed of one core in FLOP/s, for linear layers and for a plain matrix product. Takes a few seconds.

    The first result maps each multiplication method to a list of rates, one for each entry of RATED_ROWS. The methods
    are TORCH and those that this processor supports. The rates cover all linear layers of a decoder layer, with norms,
    gate and residuals.

    The second result is the rate of torch's product of two matrices in bf16 or fp32, whichever is faster. It is close
    to the maximum rate of the core.
    """
    ways = dict.fromkeys([TORCH], _by_torch)
    if native.load():
        has = {WIDENED: True, DOT: native.operators().has_dots, TILES: native.operators().has_tiles}
        ways = {way: partial(_in_panels, way) for way, is_there in has.items() if is_there} | ways
    heads = _HEADS * _HEAD_DIM
    weights = _HIDDEN * (2 * heads + 2 * _KV_HEADS * _HEAD_DIM + 3 * _FFN)
    rates = {}
    with _one_thread(), torch.inference_mode():
        for way, make in ways.items():
            layers = [_layer(make) for _ in range(_NUM_LAYERS)]
            runs = [_in_turn(layers, _random(rows, _HIDDEN)) for rows in RATED_ROWS]
            computed = [rows * _num_calls(rows) for rows in RATED_ROWS]
            rates[way] = [2e9 * weights * rows / _median_ns(run) for run, rows in zip(runs, computed, strict=True)]
        square = _random(_BARE, _BARE)
        bare_ns = min(_median_ns(partial(torch.mm, x, x)) for x in (square, square.float()))
        return rates, 2e9 * _BARE**3 / bare_ns


def _median_ns(run: Callable[[], object]) -> float:
    """Return the median processor time of a run in nanoseconds, after one run that is not counted."""
    run()
    return statistics.median(_cpu_ns(run) for _ in range(_REPEATS))


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _is_beaten(preferred: _Run, other: _Run) -> bool:
    """Return whether the preferred run takes more than `MARGIN` times as long as the other run."""
    for run in (preferred, other):  # fills caches and maps memory before the timed runs
        run()
    lead = 0
    for _ in range(_MOST_COMPARISONS):
        lead += 1 if _cpu_ns(preferred) > MARGIN * _cpu_ns(other) else -1
        if abs(lead) == _LEAD:
            break
    return lead > 0


def _cpu_ns(run: Callable[[], object]) -> int:
    start_ns = time.thread_time_ns()
    run()
    return time.thread_time_ns() - start_ns


def _choose_vectors() -> str:
    """Return attention's multiplication method without tiles: DOT if the processor supports it, unless WIDENED is
    faster."""
    if not native.operators().has_dots:
        return WIDENED
    q_TNH = _random(_QUERIES, _HEADS, _HEAD_DIM)
    kv_S2GH = _random(_KEYS, 2, _KV_HEADS, _HEAD_DIM)

    def attend(product: str) -> _Run:
        keys, values = [kv_S2GH[:, 0]], [kv_S2GH[:, 1]]
        return lambda: native.operators().prefill_attention(q_TNH, keys, values, False, product)

    return WIDENED if _is_beaten(attend(DOT), attend(WIDENED)) else DOT


def _choose_panels() -> str:
    """Return the C++ linear layers' multiplication method without tiles: DOT if the processor supports it, unless
    WIDENED is faster with _BATCH_ROWS rows."""
    if not native.operators().has_dots:
        return WIDENED
    x_TD = _random(_BATCH_ROWS, _HIDDEN)
    dots, widened = ([_layer(partial(_in_panels, way)) for _ in range(_NUM_LAYERS)] for way in (DOT, WIDENED))
    return WIDENED if _is_beaten(_in_turn(dots, x_TD), _in_turn(widened, x_TD)) else DOT


def _choose_torch_rows(panels: str) -> int | None:
    """Return the smallest entry of `ROWS` for which, and for all larger entries, torch's linear layers are faster than
    those in C++. None: no such entry exists."""
    ours = [_layer(partial(_in_panels, panels)) for _ in range(_NUM_LAYERS)]
    torchs = [_layer(_by_torch) for _ in range(_NUM_LAYERS)]
    chosen = None
    for rows in reversed(ROWS):
        x_TD = _random(rows, _HIDDEN)
        if not _is_beaten(_in_turn(ours, x_TD), _in_turn(torchs, x_TD)):
            break
        chosen = rows
    return chosen


def _layer(make: Callable[[Tensor, bool, bool], _Linear]) -> _Layer:
    """Return the linear layers of one decoder layer, with the norms, gate and residuals around them.
    `make(weight, is_gated, has_norm)` returns one linear layer."""
    heads = _HEADS * _HEAD_DIM
    qkv = make(_random(heads + 2 * _KV_HEADS * _HEAD_DIM, _HIDDEN), False, True)
    output = make(_random(_HIDDEN, heads), False, False)
    gate_up = make(_random(2 * _FFN, _HIDDEN), True, True)
    down = make(_random(_HIDDEN, _FFN), False, False)

    def run(x_TD: Tensor) -> None:
        qkv(x_TD, None)
        hidden_TD = output(x_TD, x_TD)  # x_TD in place of attention's output, which has the same shape
        down(gate_up(hidden_TD, None), hidden_TD)

    return run


def _by_torch(weight_NK: Tensor, is_gated: bool, has_norm: bool) -> _Linear:
    """Return a function of the input and the residual that computes a norm and a linear layer like
    `baton.modeling.forward.linear.TorchLinear`, which this module must not import: layers are built on kernels."""
    gain_K = torch.ones(weight_NK.shape[1], dtype=torch.bfloat16)

    def run(x_TK: Tensor, residual_TN: Tensor | None) -> Tensor:
        if has_norm:
            x_TK = F.rms_norm(x_TK, gain_K.shape, gain_K, _EPS)
        out_TN = F.linear(x_TK, weight_NK)
        if is_gated:
            gate_TI, up_TI = out_TN.chunk(2, dim=-1)
            out_TN = F.silu(gate_TI).mul_(up_TI)
        return out_TN if residual_TN is None else residual_TN + out_TN

    return run


def _in_panels(product: str, weight_NK: Tensor, is_gated: bool, has_norm: bool) -> _Linear:
    """Return a function of the input and the residual that calls the C++ kernel of linear layers. The order of the
    weight's rows does not matter for measurements."""
    gain_K = torch.ones(weight_NK.shape[1], dtype=torch.bfloat16) if has_norm else None
    panels_PJL = pack_panels(weight_NK, product)
    sizes = weight_NK.shape[1], len(weight_NK) // 2 if is_gated else len(weight_NK)
    weights = bind_panels((panels_PJL, None), sizes, None, gated=is_gated, product=product)
    linear = native.operators().linear

    def run(x_TK: Tensor, residual_TN: Tensor | None) -> Tensor:
        return linear(x_TK, weights, gain_K, _EPS, residual_TN)

    return run


def _num_calls(rows: int) -> int:
    """Return the number of calls with `rows` rows that a run makes."""
    return -(-_LEAST_ROWS // rows)


def _in_turn(layers: list[_Layer], x_TD: Tensor) -> _Run:
    """Return a run that calls the layers one after the other, and starts again after the last."""
    turns = itertools.cycle(layers)
    num_calls = _num_calls(len(x_TD))

    def run() -> None:
        for layer in itertools.islice(turns, num_calls):
            layer(x_TD)

    return run


def _random(*size: int) -> Tensor:
    return torch.randn(*size).mul_(size[-1] ** -0.5).bfloat16()
