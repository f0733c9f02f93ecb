"""Common parts of all benchmarks: alternating measurements, output rows in one format, and a description of the
machine.

The speed of a machine varies over time. Two sides are therefore always measured alternately (A, B, A, B, ...). Each
measurement of A forms a pair with the next one of B. The ratio of a pair is A / B, or B / A if smaller values are
better. The median of the ratios is reported. An output row is `{"bench", "case", "metric", "value", "unit", "baseline",
"baseline_value", "ratio"}`. For every metric, a `ratio` above 1 means that the value is better than the baseline.
"""

import argparse
import contextlib
import json
import math
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from baton.settings.paths import cache_folder
from deploy.config.environment import DEFAULT_MODEL
from deploy.options.subcommand import DefaultsFormatter

PAIRS = 9
QUICK_PAIRS = 3
_RATES = ("gb_s", "gb_cpu_s", "tokens_s", "tokens_step", "gflops", "goodput")
"""Metrics for which a larger value is better. For all other metrics, a smaller value is better."""


@dataclass(frozen=True)
class Row:
    """Output row of a benchmark: one measured value compared with the value of a baseline."""

    bench: str
    case: str
    """Name of the measured case: key=value pairs separated by commas."""
    metric: str
    value: float
    unit: str
    baseline: str
    baseline_value: float
    ratio: float


@dataclass(frozen=True)
class Pairs:
    """Measurements of a system (`ours`) and of its baseline (`theirs`), taken alternately. Both are in the same
    unit."""

    ours: list[float]
    theirs: list[float]

    @property
    def our_median(self) -> float:
        return statistics.median(self.ours)

    @property
    def their_median(self) -> float:
        return statistics.median(self.theirs)

    def quartiles(self, smaller_is_better: bool) -> tuple[float, float, float]:
        """Return the lower quartile, median and upper quartile of the ratios. Each pair of successive measurements
        gives one ratio: `theirs` / `ours` if smaller values are better, otherwise `ours` / `theirs`. A ratio above 1
        therefore means that `ours` is better. If there is only one pair, the three returned values are equal."""
        pairs = zip(self.ours, self.theirs, strict=True)
        ratios = [b / a if smaller_is_better else a / b for a, b in pairs]
        low, middle, high = statistics.quantiles(ratios * 2 if len(ratios) == 1 else ratios, n=4, method="inclusive")
        return low, middle, high


def interleave(ours: Callable[[], float], theirs: Callable[[], float], pairs: int) -> Pairs:
    """Call `ours` and `theirs` alternately, `pairs` times each, and return the values that they return. Before these
    calls, each function is called once to warm up, and its value is discarded."""
    ours(), theirs()
    mine, other = [], []
    for _ in range(pairs):
        mine.append(ours())
        other.append(theirs())
    return Pairs(mine, other)


def random_prompt(num_tokens: int, seed: int) -> tuple[int, ...]:
    """Return `num_tokens` random token ids, all of which exist in most vocabularies. The same seed gives the same
    ids."""
    rng = random.Random(seed)
    return tuple(rng.randint(100, 40_000) for _ in range(num_tokens))


def case(**keys: object) -> str:
    """Return a case name such as `tokens=512,ranks=2`, made of the keyword arguments in their order. A key has the same
    meaning in all benchmarks: `link` is in MB/s, `context` is a number of keys, and `tokens` is the length of a prompt
    or chunk."""
    return ",".join(f"{key}={value}" for key, value in keys.items())


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a command line parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=DefaultsFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object per row on standard output")
    parser.add_argument("--quick", action="store_true", help="fewer cases and pairs: a smoke test, not a claim")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="Hugging Face folder, GGUF file, or known name")
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="folder for converted models")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    return parser


def _finite(value: object) -> object:
    """Return None in place of NaN and infinity, which JSON does not support; return any other value unchanged."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Reporter:
    """Prints each output row when it is added, as a JSON line or as text, and a table of all rows at the end."""

    def __init__(self, bench: str, as_json: bool) -> None:
        self._bench = bench
        self._json = as_json
        self._console = Console(stderr=as_json)
        self._table = Table(
            Column("case", overflow="fold"), "metric", "value", "baseline", "its value", "ratio", "quartiles"
        )
        self._console.print(f"{bench}: {describe_machine()}", style="dim", highlight=False)

    def add(self, case_name: str, metric: str, unit: str, baseline: str, pairs: Pairs) -> Row:
        """Add and print one comparison, and return its row. For the metrics in `_RATES` a larger value is better; for
        all other metrics a smaller one."""
        low, ratio, high = pairs.quartiles(smaller_is_better=metric not in _RATES)
        ours, theirs = pairs.our_median, pairs.their_median
        row = Row(self._bench, case_name, metric, round(ours, 6), unit, baseline, round(theirs, 6), round(ratio, 3))
        if self._json:
            print(json.dumps({name: _finite(value) for name, value in asdict(row).items()}), flush=True)
        values = (f"{ours:.4g} {unit}", baseline, f"{theirs:.4g} {unit}", f"{ratio:.2f}", f"{low:.2f} to {high:.2f}")
        self._console.print(f"  {case_name} {metric}: " + "  ".join(values), highlight=False, style="dim")
        self._table.add_row(case_name, metric, *values)
        return row

    def close(self) -> None:
        """Print a table of all rows that were added."""
        self._console.print(self._table)


class Bars:
    """Checks measured values against the benchmark's limits (bars). Prints each result at once, and all results at the
    end."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._verdicts: list[tuple[bool, str]] = []

    def at_least(self, what: str, value: float, bar: float) -> None:
        """Check that `value` is at least `bar`, and print the result. `what` describes the value."""
        self._check(f"{what}: {value:.3f}, at least {bar:g}", value >= bar)

    def at_most(self, what: str, value: float, bar: float) -> None:
        """Check that `value` is at most `bar`, and print the result. `what` describes the value."""
        self._check(f"{what}: {value:.3f}, at most {bar:g}", value <= bar)

    def close(self) -> int:
        """Print all results. Return the exit status: 0, or 1 if a value misses its limit."""
        for verdict in self._verdicts:
            self._print(verdict)
        return 0 if all(holds for holds, _ in self._verdicts) else 1

    def _check(self, text: str, holds: bool) -> None:
        self._verdicts.append((holds, text))
        self._print(self._verdicts[-1])

    def _print(self, verdict: tuple[bool, str]) -> None:
        holds, text = verdict
        self._console.print(f"  {'PASS' if holds else 'FAIL'}  {text}", markup=False, style="green" if holds else "red")


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Context manager. Show the progress of `total` rounds on standard error: a line that counts rounds on a terminal,
    else one line at the start. Yield a function that must be called after each round."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.print(f"  {what}: {total} rounds", style="dim")
    columns = (TextColumn(f"  {what}: round"), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn between rounds only, because a thread that draws would disturb what is measured.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as shown:
        task = shown.add_task("", total=total)

        def advance() -> None:
            shown.advance(task)
            shown.refresh()

        yield advance


def describe_machine() -> str:
    """Return one line with the processor's name, the versions of libraries, and the commit."""
    cpu = _cpu_name()
    versions: Mapping[str, str] = {name: version(name) for name in ("torch", "grpcio", "transformers")}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    libraries = ", ".join(f"{name} {number}" for name, number in versions.items())
    return f"{cpu}, Python {platform.python_version()}, {libraries}, commit {commit or 'unknown'}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def resolve(args: argparse.Namespace, *, dequantised: bool = False) -> Path:
    """Return the model's folder. If necessary, the model is converted first. `dequantised`: True if programs other than
    Baton read the folder."""
    from baton.modeling.checkpoints.catalog import resolve_model
    from baton.text.gguf_tokenizer import write_tokenizer

    def report(done: int, total: int) -> None:
        print(f"\rconverting {done}/{total}", end="", file=sys.stderr)

    return resolve_model(args.model, cache=args.cache, progress=report, finish=write_tokenizer, dequantised=dequantised)


def peer_folder(args: argparse.Namespace) -> Path:
    """Return the model's folder for vLLM: that of `--peer-model`, or Baton's with all weights in bf16."""
    return args.peer_model or resolve(args, dequantised=True)
