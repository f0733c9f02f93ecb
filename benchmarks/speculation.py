"""Benchmark of speculation: measures tokens per second with and without drafts, over batch sizes, contexts, draft keys
and numbers of drafts.

Sequences continue natural texts (tests/data), greedily, from KV that is prefilled once. If `--texts quotes` is given,
the end of each prompt repeats its beginning. These sides are measured alternately:

- steps without drafts (plain)
- the methods in `--policies`, with fixed numbers of drafts and draft keys
- n-gram drafts
- `generate.speculation = auto`, which plans the number of drafts
- with `--peer-python`, vLLM's CPU build, plain and with n-gram drafts (`peers/setup_vllm_cpu.sh`)

`ratio` is relative to Baton's plain steps. If `--residency host` is given, KV is stored in host memory, and output rows
report the bytes copied between host and device per generated token. If `--link RATE` is given, the device is emulated,
with a link of this rate. The upper bound of the speedup by a fixed number of drafts is

    T_target * tokens / (drafts * T_draft + T_verify)

where `tokens` is the measured number of tokens per round, `drafts` is the number of drafts per round, and T_target,
T_verify and T_draft are the times of bare forward passes for a plain step, a verification and a draft.

If `--bars` is given, the benchmark fails if a value misses its limit.
"""

import argparse
import gzip
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from rich.console import Console

from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.device.copying import LinkRate
from baton.modeling.device.emulated import EmulatedDevice
from baton.modeling.forward.decoder import Decoder
from baton.modeling.hosting import use_cores
from baton.modeling.kernels.process_kernels import KERNELS
from baton.modeling.kernels.products import TILES
from baton.planning.speculation import MOST_DRAFTS
from baton.process.garbage import collect_rarely
from baton.sampling_params import SamplingParams
from baton.settings.byte_sizes import parse_rate
from baton.text.tokenizer import Tokenizer
from baton_lab.comparators.drafts import configured
from benchmarks.plots.speculation import Cell, draw
from benchmarks.sides.text_rows import Measured, PrefilledText, TextRows
from benchmarks.sides.vllm_peer import VllmPeer
from benchmarks.support.harness import Bars, Pairs, Reporter, case, make_parser, peer_folder, progress, resolve
from generate_workers.config import EngineConfig
from generate_workers.residency.port import DraftKeys

GRID = "1x256,4x1024,16x1024,4x4096,16x4096,32x4096,16x7500"
QUICK_GRID = "4x1024"
NUM_KEYS = "128,256,512"
NUM_DRAFTS = "1,2,3,4,6"
ROUNDS = 3
_TOKENS = 64
"""Number of measured tokens per sequence, in each round of the benchmark."""
_BEFORE = 32
"""Number of tokens per sequence that are generated before the measurement starts, in each round of the benchmark.
During this time the planner learns the costs and the acceptance rate."""
SPEEDUP_BARS = {(16, 4096): (1.2, 1.5), (16, 7500): (1.4, 1.8)}
"""Minimum speedup of `speculation = auto` over steps without drafts, by (batch size, context length). Each value is
(without AMX, with AMX)."""
QUOTES_BAR = 1.5
"""Minimum speedup of `speculation = auto` over steps without drafts, with prompts whose end repeats their beginning."""
LINK_BAR = 0.45
"""Maximum number of bytes copied between host and device per generated token with `speculation = auto`, as a fraction
of the number without drafts."""
PEER_BARS = {(16, 4096): (1.5, 2.0)}
"""Minimum ratio of the tokens per second with `speculation = auto` to those of vLLM's fastest setting, by (batch size,
context length). Each value is (without AMX, with AMX)."""
PLANNER_BAR = 0.92
"""Minimum ratio of the tokens per second with `speculation = auto` (the engine plans the number of drafts) to those
with the best fixed number of drafts, in every cell of the grid."""
ALLOWED_BAR = 0.85
"""Minimum ratio of the measured speedup of the best fixed number of drafts to its theoretical upper bound."""
_TEXTS = ("emma", "persuasion", "prideprejudice")
_DATA = Path(__file__).parents[1] / "tests/data"
_STRIDE = 9000
"""Distance in tokens between the starts of two prompts that are taken from the same text."""
_QUOTED_PART = 4
"""Divisor that gives the length of a quotation: the prompt's length divided by this number. If `--texts quotes` is
given, the end of each prompt is a quotation of the prompt's beginning."""


@dataclass(frozen=True)
class Choice:
    """Speculation settings that are compared with other settings."""

    speculation: str
    """Name of the drafting method: a value of `generate.speculation`, or a method of `baton_lab.comparators.drafts`."""
    num_drafts: int = 0
    """Number of drafts per sequence and step. 0: the engine plans the number, or makes no drafts if speculation is
    off."""
    num_keys: int = 256

    def config(self, batch: int, context: int, num_tokens: int, residency: str) -> EngineConfig:
        """Return the configuration of an engine with `batch` sequences, each of `context` prompt tokens and up to
        `num_tokens` output tokens."""
        return EngineConfig(
            num_slots=batch,
            max_slot_tokens=context + num_tokens + MOST_DRAFTS + 1,
            residency=residency,
            speculation=configured(self.speculation),
            draft_tokens=self.num_drafts,
            draft_keys=self.num_keys,
        )

    @property
    def keys(self) -> dict[str, object]:
        """Key-value pairs that identify these settings in the case name of an output row."""
        keys: dict[str, object] = {"policy": self.speculation}
        return keys | ({"keys": self.num_keys, "drafts": self.num_drafts} if self.num_drafts else {})


PLAIN = Choice("off")


@dataclass
class Found:
    """Measurements of one speculation setting in one cell of the grid, with one entry per round."""

    rates: list[float] = field(default_factory=list)
    """Tokens per second of all sequences together, one value per round."""
    tokens: list[float] = field(default_factory=list)
    """Mean number of tokens that a sequence generates per step, one value per round."""
    accepted: list[float] = field(default_factory=list)
    """Fraction of the drafts that were accepted, one value per round. 0 if no drafts were made."""
    link_mb: list[float] = field(default_factory=list)
    """Megabytes copied between host and device per generated token, one value per round."""

    def add(self, measured: Measured) -> None:
        """Append the measurements of one round."""
        self.rates.append(measured.rate)
        self.tokens.append(measured.tokens_step)
        self.accepted.append(measured.accepted_share)
        self.link_mb.append(measured.link_mb)


def texts_of(
    decoder: Decoder, tokenizer: Tokenizer, batch: int, context: int, *, quotes: bool = False
) -> list[PrefilledText]:
    """Return `batch` prefilled prompts of `context` tokens. Successive prompts are taken from different novels of
    `_TEXTS`. If `quotes` is true, the end of each prompt is a copy of its beginning."""
    ids = [tokenizer.encode(gzip.decompress((_DATA / f"{name}.txt.gz").read_bytes()).decode()) for name in _TEXTS]
    starts = [(ids[row % len(ids)], row // len(ids) * _STRIDE + _STRIDE // 4) for row in range(batch)]
    with progress(f"prefill {batch} x {context}", batch) as advance:
        texts = []
        for text, start in starts:
            prompt = text[start : start + context]
            quoted = context // _QUOTED_PART if quotes else 0
            texts.append(PrefilledText.of(decoder, prompt[: context - quoted] + prompt[:quoted]))
            advance()
    return texts


class Bench:
    """Decoder and options that all cells of the grid (pairs of batch size and context length) share, with the functions
    that measure a cell."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.folder = resolve(args)
        self.decoder = load_decoder(self.folder, dtype=args.dtype)
        self.rounds = 1 if args.quick else args.rounds
        self.console = Console(stderr=True, highlight=False)

    def fixed(self) -> Iterator[Choice]:
        """Yield the settings to measure that have a fixed number of drafts: all combinations of the given drafting
        methods, numbers of draft keys and numbers of drafts."""
        numbers = product(self.args.policies.split(","), _numbers(self.args.keys), _numbers(self.args.drafts))
        for policy, keys, drafts in numbers:
            yield Choice(policy, drafts, keys)

    def cell(self, texts: Sequence[PrefilledText], choices: Sequence[Choice]) -> dict[Choice, Found]:
        """Measure all `choices` alternately on one cell of the grid. Return the measurements by choice."""
        found = {choice: Found() for choice in choices}
        with progress(f"{len(texts)} x {len(texts[0].token_ids)}", self.rounds * len(choices)) as advance:
            for _ in range(self.rounds):
                for choice in choices:
                    found[choice].add(self._measure(texts, choice))
                    advance()
        return found

    def peers(self, texts: Sequence[PrefilledText]) -> dict[str, list[float]]:
        """Return vLLM's tokens per second, one value per round, for vLLM's speculation settings: `vllm` (none) and
        `vllm_ngram`. Empty without `--peer-python`."""
        if self.args.peer_python is None:
            return {}
        model, cores = peer_folder(self.args), sorted(os.sched_getaffinity(0))
        context = len(texts[0].token_ids)
        kv_gib = 1 + len(texts) * (context + 2 * _TOKENS) * self.decoder.layout.token_bytes // 2**30
        settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": str(kv_gib)}
        found: dict[str, list[float]] = {}
        for policy, options in (("vllm", []), ("vllm_ngram", ["--ngram-drafts", "3"])):
            with VllmPeer.running(self.args.peer_python, model, cores, settings, options=options) as peer:
                peer.ask({"texts": [text.token_ids for text in texts]})
                peer.ask({"generate": _BEFORE * len(texts)})
                answers = [peer.ask({"generate": _TOKENS * len(texts)}) for _ in range(self.rounds)]
                found[policy] = [float(str(answer["tokens_s"])) for answer in answers]
        return found

    def allowed(self, texts: Sequence[PrefilledText], choice: Choice, tokens: float) -> float:
        """Return the theoretical upper bound of the speedup over steps without drafts. `choice` has the speculation
        settings, with the drafting method `streaming` and a fixed number of drafts. The bound is computed from the
        times of forward passes without the engine. `tokens` is the measured mean number of tokens per round."""
        keys = DraftKeys.of(choice.num_keys, MOST_DRAFTS)
        with self._running(texts, PLAIN) as rows:
            rows.measure(len(texts))
            target, verify, draft = (
                statistics.median(rows.bare_ms(*asked) for _ in range(5))
                for asked in ((0,), (choice.num_drafts,), (0, keys))
            )
        self.console.print(f"  bare: target {target:.1f} ms, verify {verify:.1f} ms, draft {draft:.1f} ms", style="dim")
        return target * tokens / (choice.num_drafts * draft + verify)

    def _running(self, texts: Sequence[PrefilledText], choice: Choice) -> AbstractContextManager[TextRows]:
        num_tokens = _TOKENS + _BEFORE + 4 * MOST_DRAFTS
        params = SamplingParams(max_tokens=num_tokens, temperature=self.args.temperature, seed=1, ignore_eos=True)
        config = choice.config(len(texts), len(texts[0].token_ids), num_tokens, self.args.residency)
        return TextRows.running(self._served(), self.folder, texts, params, config, speculation=choice.speculation)

    def _served(self) -> Decoder:
        """Return the decoder, on an emulated device if there is a link."""
        if not self.args.link:
            return self.decoder
        return Decoder(self.decoder.config, self.decoder.weights, device=EmulatedDevice(LinkRate(self.args.link)))

    def _measure(self, texts: Sequence[PrefilledText], choice: Choice) -> Measured:
        with self._running(texts, choice) as rows:
            rows.measure(_BEFORE * len(texts))
            return rows.measure(_TOKENS * len(texts))


def report(bench: Bench, reporter: Reporter, bars: Bars, texts: Sequence[PrefilledText]) -> Cell:
    """Measure one cell of the grid, add its output rows, and check its limits. Return the measurements for the plot."""
    batch, context = len(texts), len(texts[0].token_ids)
    fixed = list(bench.fixed())
    found = bench.cell(texts, [PLAIN, *fixed, Choice("ngram"), Choice("auto")])
    plain, ratios = found.pop(PLAIN), {}
    where, is_tiled = f"{batch} x {context}", KERNELS.choice.attention == TILES
    for choice, each in found.items():
        name = case(batch=batch, context=context, **choice.keys)
        ratios[choice] = reporter.add(name, "tokens_s", "tokens/s", "plain", Pairs(each.rates, plain.rates)).ratio
        reporter.add(name, "tokens_step", "tokens/step", "plain", Pairs(each.tokens, plain.tokens))
        reporter.add(name, "accepted_share", "drafts", "all", Pairs(each.accepted, [1.0] * len(each.accepted)))
        if any(plain.link_mb):
            row = reporter.add(name, "link_mb_token", "MB", "plain", Pairs(each.link_mb, plain.link_mb))
            if choice.speculation == "auto":
                bars.at_most(f"{where}, auto, bytes over the link for a token", 1 / row.ratio, LINK_BAR)
    best = max(fixed, key=ratios.__getitem__)
    auto = ratios[Choice("auto")]
    if best.speculation == "streaming" and bench.args.residency == "device":
        allowed = bench.allowed(texts, best, statistics.median(found[best].tokens))
        what = f"{where}, {best.num_drafts} drafts over {best.num_keys} keys, of the bound"
        bars.at_least(what, ratios[best] / allowed, ALLOWED_BAR)
    bars.at_least(f"{where}, auto, of the best fixed choice or plain", auto / max(ratios[best], 1.0), PLANNER_BAR)
    if bench.args.texts == "quotes":
        bars.at_least(f"{where}, auto, of plain", auto, QUOTES_BAR)
    elif (batch, context) in SPEEDUP_BARS:
        bars.at_least(f"{where}, auto, of plain", auto, SPEEDUP_BARS[batch, context][is_tiled])
    rates = found[Choice("auto")].rates
    peers = bench.peers(texts)
    for policy, theirs in peers.items():
        reporter.add(
            case(batch=batch, context=context, policy="auto"), "tokens_s", "tokens/s", policy, Pairs(rates, theirs)
        )
    if peers and (batch, context) in PEER_BARS:
        most = max(statistics.median(theirs) for theirs in peers.values())
        bars.at_least(f"{where}, auto, of vLLM", statistics.median(rates) / most, PEER_BARS[batch, context][is_tiled])
    return Cell(batch, context, ratios[best], auto, statistics.median(plain.rates), statistics.median(rates))


def run(args: argparse.Namespace) -> int:
    """Measure all cells of the grid. Return 0, or 1 if `--bars` is given and a value misses its limit."""
    cores = sorted(os.sched_getaffinity(0))
    use_cores(cores, len(cores))
    reporter, bars = Reporter("speculation", args.json), Bars()
    bench = Bench(args)
    collect_rarely()  # as workers do
    tokenizer = Tokenizer.load(bench.folder)
    cells = [
        tuple(map(int, cell.split("x"))) for cell in (args.grid or (QUICK_GRID if args.quick else GRID)).split(",")
    ]
    done = list[Cell]()
    for context in sorted({context for _, context in cells}):
        batches = [batch for batch, each in cells if each == context]
        quotes = args.texts == "quotes"
        texts = texts_of(bench.decoder, tokenizer, max(batches), context, quotes=quotes)
        done += [report(bench, reporter, bars, texts[:batch]) for batch in sorted(batches)]
    reporter.close()
    if args.plot is not None:
        draw(done, args.plot)
    return bars.close() if args.bars else 0


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--grid", default=None, help=f"batch x context cases (default {GRID})")
    text = "drafts of the fixed choices: names of generate.speculation, quest, topk"
    parser.add_argument("--policies", default="streaming", help=text)
    parser.add_argument("--keys", default=NUM_KEYS, help="numbers of keys that drafts attend to, for the fixed choices")
    parser.add_argument(
        "--drafts", default=NUM_DRAFTS, help="numbers of drafts per sequence and round, for the fixed choices"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="number of measurements of each side")
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature; 0: greedy")
    parser.add_argument("--texts", choices=("novels", "quotes"), default="novels", help="texts that sequences continue")
    parser.add_argument("--residency", choices=("device", "host"), default="device", help="residency policy of the KV")
    parser.add_argument(
        "--link",
        type=parse_rate,
        default=0,
        help="rate of the link to an emulated device, for example 4GBps; 0: no device",
    )
    parser.add_argument("--peer-python", type=Path, default=None, help="Python of vLLM's environment")
    parser.add_argument("--peer-model", type=Path, default=None, help="Hugging Face folder for vLLM; default: Baton's")
    parser.add_argument("--plot", type=Path, default=None, help="file for a plot (PNG)")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
