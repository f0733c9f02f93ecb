"""Benchmark of int8 weights: compares their perplexity and step times with those of bf16 weights.

Perplexity is computed over separate windows of a novel. A decode step yields one token per sequence at a given context
length, and includes logits and greedy sampling. Both formats are measured alternately.
"""

import argparse
import gzip
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.forward.decoder import Decoder
from baton.modeling.kv.buffers import BufferSpan, KvBuffer
from baton.text.tokenizer import Tokenizer
from baton.types import TokenRange
from benchmarks.support.harness import (
    PAIRS,
    QUICK_PAIRS,
    Pairs,
    Reporter,
    case,
    interleave,
    make_parser,
    progress,
    resolve,
)

_NOVEL = Path(__file__).parents[1] / "tests" / "data" / "persuasion.txt.gz"
_STEPS = 4
_SCORED = 256
"""Number of positions whose logits are computed at once, which limits memory use."""


def windows(folder: Path, num_windows: int, num_tokens: int) -> Iterator[list[int]]:
    """Yield `num_windows` consecutive windows of a novel, as lists of `num_tokens` token ids."""
    ids = Tokenizer.load(folder).encode(gzip.decompress(_NOVEL.read_bytes()).decode()[: 8 * num_windows * num_tokens])
    for window in range(num_windows):
        yield ids[window * num_tokens : (window + 1) * num_tokens]


@torch.inference_mode()
def perplexity(decoder: Decoder, ids: list[int]) -> float:
    """Return the perplexity of one window of text. The first token is not scored."""
    tokens = TokenRange(0, len(ids))
    hidden_TD = decoder.forward(ids, [BufferSpan(KvBuffer(decoder.layout, tokens), tokens)])
    loss = 0.0
    for start in range(0, len(ids) - 1, _SCORED):
        successors_R = torch.tensor(ids[start + 1 : start + 1 + _SCORED])
        logits_RV = decoder.logits(hidden_TD[start : start + len(successors_R)])
        loss += float(torch.nn.functional.cross_entropy(logits_RV, successors_R, reduction="sum"))
    return math.exp(loss / (len(ids) - 1))


def step_of(decoder: Decoder, batch: int, context: int) -> Callable[[], float]:
    """Return a function that runs a few decode steps and returns their mean milliseconds. Each step runs the decoder on
    `batch` sequences at a fixed context length, including logits and greedy sampling but no engine."""
    tokens = TokenRange(0, context + 1)
    buffers = [KvBuffer(decoder.layout, tokens) for _ in range(batch)]
    for buffer in buffers:
        buffer.data.normal_()
    spans = [BufferSpan(buffer, TokenRange(context, context + 1)) for buffer in buffers]

    def step_ms() -> float:
        with torch.inference_mode():
            start = time.perf_counter()
            for _ in range(_STEPS):
                decoder.logits(decoder.forward([1] * batch, spans)).argmax(-1)
        return (time.perf_counter() - start) / _STEPS * 1e3

    return step_ms


def run(args: argparse.Namespace) -> int:
    """Measure perplexity, then step times. Return 0."""
    folder = resolve(args)
    plain = load_decoder(folder, dtype="bfloat16", weights="bfloat16")
    rounded = load_decoder(folder, dtype="bfloat16", weights="int8")
    reporter = Reporter("quantization", args.json)
    ours, theirs = [], []
    num_windows = 2 if args.quick else args.windows
    with progress("perplexity", num_windows) as advance:
        for ids in windows(folder, num_windows, args.tokens):
            ours.append(perplexity(rounded, ids))
            theirs.append(perplexity(plain, ids))
            advance()
    reporter.add(case(tokens=args.tokens, dtype="int8"), "perplexity", "", "bfloat16", Pairs(ours, theirs))
    pairs = QUICK_PAIRS if args.quick else PAIRS
    for batch in (1, 16):
        sides = (step_of(rounded, batch, args.context), step_of(plain, batch, args.context))
        name = case(batch=batch, context=args.context, dtype="int8", threads=torch.get_num_threads())
        reporter.add(name, "step_ms", "ms", "bfloat16", interleave(*sides, pairs))
    reporter.close()
    return 0


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--windows", type=int, default=24, help="number of windows of text")
    parser.add_argument("--tokens", type=int, default=1024, help="number of tokens of a window")
    parser.add_argument("--context", type=int, default=192, help="context length of the sequences in a step")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
