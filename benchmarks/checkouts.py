"""Compares the speed of this checkout with that of another one. Runs one benchmark alternately in both, and compares
every result row.

`python -m benchmarks.checkouts ../before decode --alone --pairs 1` runs `python -m benchmarks.decode --json --alone
--pairs 1` alternately in this checkout and in `../before`, a checkout of another commit. Both use the packages of this
environment. Each uses its own kernels, which are built first.

Each value measured in this checkout is paired with the same value in the other checkout. The median of the ratios is
reported; it is above 1 if this checkout is better. With `--bars`, the command fails if a ratio is below 0.95.
"""

import json
import subprocess
import sys
from argparse import REMAINDER, ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support.harness import PAIRS, Bars, Pairs, Reporter, progress
from deploy.options.subcommand import DefaultsFormatter

BAR = 0.95
"""Minimum ratio of this checkout's performance to that of the other, for every result row: the median of the ratios of
all pairs of runs. With `--bars`, the command fails if a ratio is lower."""
Key = tuple[str, str, str]
"""Identity of a result row: (case, metric, unit)."""


def values(checkout: Path, benchmark: Sequence[str]) -> dict[Key, float]:
    """Run a benchmark in a checkout, and return the values of its result rows. A failure of the benchmark because of
    missed requirements (`--bars`) is ignored. Raises SystemExit with the benchmark's output if it prints no rows."""
    name, *options = benchmark
    command = ["env", f"PYTHONPATH={checkout}", sys.executable, "-m", f"benchmarks.{name}", "--json", *options]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not rows:
        sys.exit(f"{checkout}: benchmarks.{name} ended with status {done.returncode} and no row:\n{done.stderr}")
    return {(row["case"], row["metric"], row["unit"]): row["value"] for row in rows if row["value"]}


def build(checkout: Path) -> None:
    """Build the native kernels of a checkout in its source tree. Does nothing if the checkout has no
    setup.py; such a checkout builds its kernels at first use. Raises CalledProcessError if the build fails."""
    if (checkout / "setup.py").exists():
        subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=checkout, check=True)


def commit_of(checkout: Path) -> str:
    """Return the short id of the checkout's current commit."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    """Compare this checkout with another one; return the exit status."""
    parser = ArgumentParser(description=__doc__, formatter_class=DefaultsFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object a row on standard output")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="number of rounds, each with one run per checkout")
    parser.add_argument("--bars", action="store_true", help=f"exit with 1 when a ratio is below {BAR}")
    parser.add_argument("other", type=Path, help="checkout of another commit")
    parser.add_argument("benchmark", nargs=REMAINDER, help="name of a benchmark, and its options")
    args = parser.parse_args()
    if not args.benchmark:
        parser.error("benchmark is missing: name one, like `decode --alone`")
    here, there = Path.cwd(), args.other.resolve()
    for checkout in (here, there):
        build(checkout)
    ours, theirs = list[dict[Key, float]](), list[dict[Key, float]]()
    with progress(" ".join(args.benchmark), args.pairs) as advance:
        for index in range(args.pairs):
            sides = [(here, ours), (there, theirs)]
            for checkout, found in sides if index % 2 else sides[::-1]:  # neither side is always the first
                found.append(values(checkout, args.benchmark))
            advance()
    reporter, bars = Reporter(args.benchmark[0], args.json), Bars()
    baseline = commit_of(there)
    for key in ours[0]:
        if all(key in each for each in (*ours, *theirs)):
            case, metric, unit = key
            pairs = Pairs([each[key] for each in ours], [each[key] for each in theirs])
            row = reporter.add(case, metric, unit, baseline, pairs)
            if args.bars:
                bars.at_least(f"{case} {metric}, ratio to {baseline}", row.ratio, BAR)
    reporter.close()
    return bars.close()


if __name__ == "__main__":
    sys.exit(main())
