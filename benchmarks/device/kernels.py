"""Measures kernels of one layer on a GPU: attention (Baton's and torch's), matrix products, and sampling.

KV is random and stored in pages, as in a server. The pages of a prompt form a given number of contiguous runs. In a
server that has run for a while, a prompt of 1,024 tokens has 8 to 12 runs, and a prompt of 8,192 tokens has about 28.

B sequences, T queries, S keys, N heads, G kv heads, H head dim, K inputs and O outputs of a product, V vocabulary.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

from baton.modeling.device.port import Device
from baton.modeling.forward.drawing import DrawKind, Draws, RowDraw, choose_tokens
from baton.modeling.kernels.triton.decode import decode_attention
from baton.modeling.kernels.triton.row_kernels import StepRows
from baton.modeling.kernels.triton.spans import SpanRows, divide, span_attention, tiles_for
from baton.modeling.kv.pages import PAGE_TOKENS
from benchmarks.device.model import Shape
from benchmarks.device.rates import times_s

PREFILLS = ((1024, 0, 1), (1024, 0, 8), (2048, 6144, 1), (2048, 6144, 28), (8192, 0, 1), (8192, 0, 28))
"""Cases of prefill attention, each as (number of queries, number of keys before them, number of contiguous runs of
pages)."""
DECODES = ((1, 1024), (16, 1024), (64, 1024), (256, 1024), (1, 8192), (16, 4096), (16, 32768))
"""Cases of decode attention, each as (number of sequences, number of keys of each sequence)."""
PRODUCT_ROWS = (1, 16, 64, 256, 2048)
DRAWN = ((1, 32_000), (64, 32_000), (64, 128_256), (256, 128_256))
"""Cases of sampling, each as (number of sequences, vocabulary size)."""
_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
_COPIES = 8
"""Number of copies of the layers or weights that a measurement uses one after another, so that the data of a call
are not already in a cache."""
_REPEATS = 5


@dataclass(frozen=True)
class Measured:
    """Time of a kernel, and the time of its baseline. The baseline is another kernel, or the minimum time that the
    device's rates allow."""

    case: Mapping[str, object]
    metric: str
    ms: float
    baseline: str
    baseline_ms: float


@dataclass(frozen=True)
class Rates:
    """Measured rates of the device. `memory`: bytes per second of a copy, with reads and writes added up. `product`:
    operations per second of a large matrix product."""

    memory: float
    product: float


def prefills(shape: Shape, device: Device, rates: Rates) -> Iterator[Measured]:
    """Measure the prefill attention of one layer over pages. One baseline is the time of the same number of operations
    at the rate of a matrix product. The other baselines are torch's attention kernels. They are measured only for
    prompts that have no earlier keys and whose pages form a single contiguous run."""
    for num_queries, num_before, num_runs in PREFILLS:
        num_keys = num_before + num_queries
        pages = num_keys // PAGE_TOKENS, PAGE_TOKENS, 2, shape.num_kv_heads, shape.head_dim
        q_TNH, pages_PS2GH = _random(device, num_queries, shape.num_heads, shape.head_dim), _random(device, *pages)
        rows = StepRows(
            table_BC=_table(pages[0], num_runs).to(device.torch_device),
            lengths_B=torch.full((1,), num_keys, dtype=torch.int32, device=device.torch_device),
            starts_E=torch.tensor([0, num_queries], dtype=torch.int32, device=device.torch_device),
            most_queries=num_queries,
            most_keys=num_keys,
        )
        tiles = tiles_for(shape.head_dim, pages_PS2GH.dtype, device.torch_device)
        blocks_X2 = divide([num_queries], [num_keys], shape.num_heads // shape.num_kv_heads, tiles.rows)
        spans = SpanRows(rows, torch.from_numpy(blocks_X2).to(device.torch_device), tiles)
        found_ms = _ms(device, functools.partial(span_attention, q_TNH, pages_PS2GH, spans))
        flops = 4.0 * shape.hidden_size * num_queries * (num_before + num_queries / 2)
        case = {"queries": num_queries, "before": num_before, "runs": num_runs}
        yield Measured(case, "prefill_attention_ms", found_ms, "product", 1e3 * flops / rates.product)
        if num_runs > 1 or num_before:
            continue
        kv_S2GH = pages_PS2GH.flatten(0, 1)
        for name, backend in _BACKENDS.items():
            baseline_ms = _sdpa_ms(device, q_TNH, kv_S2GH[:, 0], kv_S2GH[:, 1], backend)
            yield Measured(case, "prefill_attention_ms", found_ms, name, baseline_ms)


def decodes(shape: Shape, device: Device, rates: Rates) -> Iterator[Measured]:
    """Measure the decode attention of one layer, replayed from a CUDA graph. The baseline is the time to read the
    KV."""
    for batch, context in DECODES:
        row_pages = -(-context // PAGE_TOKENS)
        pages = _COPIES, batch * row_pages, PAGE_TOKENS, 2, shape.num_kv_heads, shape.head_dim
        there = device.torch_device
        data_LPS2GH = torch.randn(pages, dtype=torch.bfloat16, device=there)
        order = torch.randperm(batch * row_pages, dtype=torch.int32, device=there)
        rows = StepRows(
            table_BC=order.view(batch, row_pages),
            lengths_B=torch.full((batch,), context, dtype=torch.int32, device=there),
            starts_E=torch.arange(batch + 1, dtype=torch.int32, device=there),
            most_queries=1,
            most_keys=context,
        )
        q_BNH = torch.randn(batch, shape.num_heads, shape.head_dim, dtype=torch.bfloat16, device=there)

        def attend_all(q: Tensor = q_BNH, data: Tensor = data_LPS2GH, rows: StepRows = rows) -> None:
            for layer_PS2GH in data:
                decode_attention(q, layer_PS2GH, rows)

        found_ms = _replayed_ms(device, attend_all) / _COPIES
        bound_ms = 1e3 * data_LPS2GH[0].nbytes / rates.memory
        yield Measured({"batch": batch, "context": context}, "decode_attention_ms", found_ms, "bytes", bound_ms)


def products(shape: Shape, device: Device, rates: Rates) -> Iterator[Measured]:
    """Measure torch's matrix products with weights of the model's shapes. The baseline is max(time to read the
    weights, time to compute the product), at the device's measured rates."""
    hidden, heads = shape.hidden_size, shape.num_heads + 2 * shape.num_kv_heads
    shapes = {
        "qkv": (heads * shape.head_dim, hidden),
        "out": (hidden, hidden),
        "gate_up": (2 * shape.intermediate_size, hidden),
        "down": (hidden, shape.intermediate_size),
        "head": (shape.vocab_size, hidden),
    }
    for name, (num_outputs, num_inputs) in shapes.items():
        weights = [_random(device, num_outputs, num_inputs) for _ in range(_COPIES)]
        for num_rows in PRODUCT_ROWS:
            x_TK = _random(device, num_rows, num_inputs)

            def multiply(x: Tensor = x_TK, weights: list[Tensor] = weights) -> None:
                for weight_OK in weights:
                    linear(x, weight_OK)

            found_ms = _replayed_ms(device, multiply) / _COPIES
            bound_s = max(weights[0].nbytes / rates.memory, 2.0 * num_rows * weights[0].numel() / rates.product)
            case = {"product": name, "rows": num_rows}
            yield Measured(case, "product_ms", found_ms, "bytes or product", 1e3 * bound_s)


def draws(device: Device, rates: Rates) -> Iterator[Measured]:
    """Measure sampling from fp32 logits for each kind of sampling. The baseline is the time to read the logits."""
    for batch, vocab_size in DRAWN:
        logits_BV = torch.randn(batch, vocab_size, device=device.torch_device)
        row = RowDraw(key=7, top_k=50, floor=-math.inf, top_p=0.95, temperature=0.8)
        rows = Draws.of([row] * batch, device.torch_device)
        for kind in DrawKind:
            found_ms = _ms(device, functools.partial(choose_tokens, logits_BV, rows, kind))
            case = {"batch": batch, "vocabulary": vocab_size, "kind": kind.name.lower()}
            yield Measured(case, "draw_ms", found_ms, "bytes", 1e3 * logits_BV.nbytes / rates.memory)


def _table(num_pages: int, num_runs: int) -> Tensor:
    """Return a block table `[1, pages]` that divides the pages into `num_runs` contiguous runs, in reverse order."""
    edges = [num_pages * run // num_runs for run in range(num_runs + 1)]
    runs = [range(start, end) for start, end in itertools.pairwise(edges)]
    return torch.tensor([[page for run in reversed(runs) for page in run]], dtype=torch.int32)


def _random(device: Device, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device.torch_device)


def _sdpa_ms(device: Device, q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, backend: SDPBackend) -> float:
    """Return the milliseconds of torch's causal attention with that backend; NaN if the backend does not support it."""
    q, k, v = (each.transpose(0, 1).unsqueeze(0).contiguous() for each in (q_TNH, k_SGH, v_SGH))
    try:
        with sdpa_kernel(backend):
            return _ms(device, lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    except RuntimeError:
        return math.nan


def _ms(device: Device, run: Callable[[], object]) -> float:
    return 1e3 * statistics.median(times_s(device, run, repeats=_REPEATS))


def _replayed_ms(device: Device, run: Callable[[], object]) -> float:
    """Return the milliseconds of the kernels that `run` launches, replayed from a CUDA graph."""
    run()
    torch.cuda.synchronize(device.torch_device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return _ms(device, graph.replay)
