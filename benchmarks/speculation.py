"""Does speculation pay? Tokens a second with drafts and without, over batches, contexts, draft keys and drafts.

Rows continue natural texts (tests/data), greedily, from KV that was prefilled once. All sides are this engine: plain
steps, fixed numbers of drafts over fixed numbers of keys, and what `generate.speculation = auto` plans. They take
turns; `ratio` is to plain steps. What bare forwards allow, T_target, T_verify and T_draft measured without the engine,
is, at the tokens a round that were measured,

    T_target tokens / (drafts T_draft + T_verify)

`--bars` checks what is promised.
"""

import argparse
import gzip
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rich.console import Console

from baton.process.garbage import collect_rarely
from baton.sampling_params import SamplingParams
from benchmarks.sides.text_rows import PrefilledText, TextRows
from benchmarks.support.harness import Bars, Pairs, Reporter, case, make_parser, progress, resolve
from generate_workers.config import EngineConfig, SpeculationName
from generate_workers.residency.port import DraftKeys
from modeling.checkpoints.weights import load_decoder
from modeling.forward.decoder import Decoder
from modeling.hosting import use_cores
from planning.speculation import MOST_DRAFTS
from text.tokenizer import Tokenizer

GRID = "1x256,4x1024,16x1024,4x4096,16x4096,32x4096,16x7500"
QUICK_GRID = "4x1024"
NUM_KEYS = "128,256,512"
NUM_DRAFTS = "1,2,3,4,6"
ROUNDS = 3
_TOKENS = 48
"""Tokens of each row and round that are measured."""
_BEFORE = 4
"""Tokens of each row and round before them."""
SPEEDUP_BARS = {(16, 4096): 1.2, (16, 7500): 1.4}
"""Least speedup of auto over plain steps, by (batch, context)."""
PLANNER_BAR = 0.92
"""Least part of the best fixed choice's tokens/s that auto reaches in every cell."""
ALLOWED_BAR = 0.85
"""Least part of the allowed speedup that the best fixed choice reaches."""
_TEXTS = ("emma", "persuasion", "prideprejudice")
_DATA = Path(__file__).parents[1] / "tests/data"
_STRIDE = 9000
"""Tokens of a text from one row's start to the next row's."""


@dataclass(frozen=True)
class Choice:
    """How a side speculates."""

    speculation: SpeculationName
    num_drafts: int = 0
    """Drafts of each row in each round; 0: as many as pay."""
    num_keys: int = 256

    def config(self, batch: int, context: int, num_tokens: int) -> EngineConfig:
        """Return the settings of an engine with so many rows."""
        return EngineConfig(
            num_slots=batch,
            max_slot_tokens=context + num_tokens + MOST_DRAFTS + 1,
            speculation=self.speculation,
            draft_tokens=self.num_drafts,
            draft_keys=self.num_keys,
        )


PLAIN = Choice("off")


@dataclass
class Found:
    """What was measured of a side in one cell."""

    rates: list[float]
    """Tokens a second, one for each round of the benchmark."""
    tokens: list[float]
    """Tokens of a row and a step."""


def texts_of(decoder: Decoder, tokenizer: Tokenizer, batch: int, context: int) -> list[PrefilledText]:
    """Prefill a prompt for each row, of texts in turn."""
    ids = [tokenizer.encode(gzip.decompress((_DATA / f"{name}.txt.gz").read_bytes()).decode()) for name in _TEXTS]
    starts = [(ids[row % len(ids)], row // len(ids) * _STRIDE + _STRIDE // 4) for row in range(batch)]
    with progress(f"prefill {batch} x {context}", batch) as advance:
        texts = []
        for text, start in starts:
            texts.append(PrefilledText.of(decoder, text[start : start + context]))
            advance()
    return texts


class Bench:
    """The decoder and the options, which all cells share."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.folder = resolve(args)
        self.decoder = load_decoder(self.folder, dtype=args.dtype)
        self.rounds = 1 if args.quick else args.rounds
        self.console = Console(stderr=True, highlight=False)

    def fixed(self) -> Iterator[Choice]:
        """Yield the fixed choices to measure."""
        for keys, drafts in product(_numbers(self.args.keys), _numbers(self.args.drafts)):
            yield Choice("streaming", drafts, keys)

    def cell(self, texts: Sequence[PrefilledText], choices: Sequence[Choice]) -> dict[Choice, Found]:
        """Measure all choices of a cell in turn."""
        found = {choice: Found([], []) for choice in choices}
        with progress(f"{len(texts)} x {len(texts[0].token_ids)}", self.rounds * len(choices)) as advance:
            for _ in range(self.rounds):
                for choice in choices:
                    rate, tokens = self._measure(texts, choice)
                    found[choice].rates.append(rate)
                    found[choice].tokens.append(tokens)
                    advance()
        return found

    def allowed(self, texts: Sequence[PrefilledText], choice: Choice, tokens: float) -> float:
        """Return the speedup that bare forwards allow a fixed choice at so many tokens a round."""
        keys = DraftKeys.of(choice.num_keys, MOST_DRAFTS)
        with self._running(texts, PLAIN) as rows:
            rows.rate(len(texts))
            target, verify, draft = (
                statistics.median(rows.bare_ms(*asked) for _ in range(5))
                for asked in ((0,), (choice.num_drafts,), (0, keys))
            )
        self.console.print(f"  bare: target {target:.1f} ms, verify {verify:.1f} ms, draft {draft:.1f} ms", style="dim")
        return target * tokens / (choice.num_drafts * draft + verify)

    def _running(self, texts: Sequence[PrefilledText], choice: Choice) -> AbstractContextManager[TextRows]:
        num_tokens = _TOKENS + _BEFORE + 4 * MOST_DRAFTS
        params = SamplingParams(max_tokens=num_tokens, temperature=self.args.temperature, seed=1, ignore_eos=True)
        config = choice.config(len(texts), len(texts[0].token_ids), num_tokens)
        return TextRows.running(self.decoder, self.folder, texts, params, config)

    def _measure(self, texts: Sequence[PrefilledText], choice: Choice) -> tuple[float, float]:
        with self._running(texts, choice) as rows:
            rows.rate(_BEFORE * len(texts))
            before, num_steps = rows.num_tokens, rows.engine.status().num_steps
            rate = rows.rate(_TOKENS * len(texts))
            num_steps = rows.engine.status().num_steps - num_steps
            return rate, (rows.num_tokens - before) / num_steps / len(texts)


def report(bench: Bench, reporter: Reporter, bars: Bars, texts: Sequence[PrefilledText]) -> None:
    """Measure one cell, and report its rows and verdicts."""
    batch, context = len(texts), len(texts[0].token_ids)
    fixed = list(bench.fixed())
    found = bench.cell(texts, [PLAIN, *fixed, Choice("ngram"), Choice("auto")])
    plain, ratios = found.pop(PLAIN), {}
    for choice, each in found.items():
        keys = {"batch": batch, "context": context, "policy": choice.speculation}
        if choice.num_drafts:
            keys |= {"keys": choice.num_keys, "drafts": choice.num_drafts}
        row = reporter.add(case(**keys), "tokens_s", "tokens/s", "plain", Pairs(each.rates, plain.rates))
        reporter.add(case(**keys), "tokens_step", "tokens/step", "plain", Pairs(each.tokens, plain.tokens))
        ratios[choice] = row.ratio
    best = max(fixed, key=ratios.__getitem__)
    where, auto = f"{batch} x {context}", ratios[Choice("auto")]
    allowed = bench.allowed(texts, best, statistics.median(found[best].tokens))
    bars.at_least(
        f"{where}, {best.num_drafts} drafts over {best.num_keys} keys, of the allowed",
        ratios[best] / allowed,
        ALLOWED_BAR,
    )
    bars.at_least(f"{where}, auto, of the best fixed choice or plain", auto / max(ratios[best], 1.0), PLANNER_BAR)
    if (batch, context) in SPEEDUP_BARS:
        bars.at_least(f"{where}, auto, of plain", auto, SPEEDUP_BARS[batch, context])


def run(args: argparse.Namespace) -> int:
    """Measure the grid; with --bars, return 1 when a bar is missed."""
    cores = sorted(os.sched_getaffinity(0))
    use_cores(cores, len(cores))
    reporter, bars = Reporter("speculation", args.json), Bars()
    bench = Bench(args)
    collect_rarely()  # as workers do
    tokenizer = Tokenizer.load(bench.folder)
    cells = [
        tuple(map(int, cell.split("x"))) for cell in (args.grid or (QUICK_GRID if args.quick else GRID)).split(",")
    ]
    for context in sorted({context for _, context in cells}):
        batches = [batch for batch, each in cells if each == context]
        texts = texts_of(bench.decoder, tokenizer, max(batches), context)
        for batch in sorted(batches):
            report(bench, reporter, bars, texts[:batch])
    reporter.close()
    return bars.close() if args.bars else 0


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--grid", default=None, help=f"batch x context cases (default {GRID})")
    parser.add_argument("--keys", default=NUM_KEYS, help="keys that drafts attend to, of the fixed choices")
    parser.add_argument("--drafts", default=NUM_DRAFTS, help="drafts of a row in a round, of the fixed choices")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often each side is measured")
    parser.add_argument("--temperature", type=float, default=0.0, help="of sampling; 0: greedy")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when the promised does not hold")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
