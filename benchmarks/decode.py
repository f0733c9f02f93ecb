"""How long is a decode step? Our decoder against transformers' (`plain`), and against vLLM-CPU when it is named.

The grid is batch x context, every row at that context. Both sides take one token a row, attend over their KV and
produce logits; greedy choice included. `--peer-python` and `--peer-model` add vLLM rows (benchmarks/peers).
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from baton.types import TokenRange
from benchmarks.harness import PAIRS, QUICK_PAIRS, Pairs, Reporter, case, interleave, make_parser, resolve
from modeling.decoder import Decoder
from modeling.kv_buffers import BufferSpan, KvBuffer
from modeling.weights import load_decoder

GRID = "1x192,16x192,32x192,16x1024,8x4096,16x4096"
QUICK_GRID = "1x192,4x512"
_STEPS = 4


def our_step(decoder: Decoder, batch: int, context: int) -> Callable[[], float]:
    """A function that measures milliseconds of one of our steps (mean of a few) at a fixed context."""
    tokens = TokenRange(0, context + 1)
    buffers = [KvBuffer(decoder.layout, tokens) for _ in range(batch)]
    for buffer in buffers:
        buffer.data.normal_()
    spans = [BufferSpan(buffer, TokenRange(context, context + 1)) for buffer in buffers]

    def measure() -> float:
        start = time.perf_counter()
        for _ in range(_STEPS):
            decoder.logits(decoder.forward([1] * batch, spans)).argmax(-1)
        return (time.perf_counter() - start) / _STEPS * 1e3

    return measure


def plain_step(folder: Path, dtype: torch.dtype, batch: int, context: int) -> Callable[[], float]:
    """The same for transformers with SDPA and a dynamic cache, cropped back after every step."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    cache = DynamicCache(config=model.config)
    config = model.config
    shape = (batch, config.num_key_value_heads, context, config.hidden_size // config.num_attention_heads)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype), layer)
    ids = torch.ones(batch, 1, dtype=torch.long)

    def measure() -> float:
        start = time.perf_counter()
        for _ in range(_STEPS):
            model(ids, past_key_values=cache, use_cache=True).logits.argmax(-1)
            cache.crop(-1)
        return (time.perf_counter() - start) / _STEPS * 1e3

    return measure


def vllm_steps(python: str, model: str, grid: str) -> dict[tuple[int, int], float]:
    """vLLM's step milliseconds by (batch, context), measured by the peer script in its own environment."""
    script = Path(__file__).parent / "peers" / "vllm_cpu_bench.py"
    command = [python, str(script), model, "--prefill", "", "--decode", grid]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {(row["batch"], row["context"]): row["step_ms"] for row in rows}


def main() -> int:
    """Runs the grid."""
    parser = make_parser(__doc__)
    parser.add_argument("--grid", default=None, help=f"batch x context cases (default {GRID})")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads on both sides")
    parser.add_argument("--peer-python", help="Python of the environment that has vllm-cpu")
    parser.add_argument("--peer-model", help="model folder for the peer; default: the same folder")
    args = parser.parse_args()
    with torch.inference_mode():
        _run(args, args.grid or (QUICK_GRID if args.quick else GRID))
    return 0


def _run(args: argparse.Namespace, grid: str) -> None:
    torch.set_num_threads(args.threads)
    folder, pairs = resolve(args), QUICK_PAIRS if args.quick else PAIRS
    reporter = Reporter("decode", args.json)
    decoder = load_decoder(folder, dtype=args.dtype)
    vllm = vllm_steps(args.peer_python, args.peer_model or str(folder), grid) if args.peer_python else {}
    for batch, context in (tuple(map(int, cell.split("x"))) for cell in grid.split(",")):
        name = case(batch=batch, context=context, dtype=args.dtype, threads=args.threads)
        ours = our_step(decoder, batch, context)
        result = interleave(ours, plain_step(folder, decoder.dtype, batch, context), pairs)
        reporter.add(name, "step_ms", "ms", "plain", result)
        if (batch, context) in vllm:  # one sitting, not interleaved: vLLM holds its own process and memory
            reporter.add(name, "step_ms", "ms", "vllm", Pairs(result.ours, [vllm[batch, context]] * pairs))
    reporter.close()


if __name__ == "__main__":
    sys.exit(main())
