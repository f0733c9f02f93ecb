"""Runs the tests that `make test` leaves out, one file at a time, for a given number of minutes.

`python -m tools.nightly [--minutes N]` runs the files in the order of their last runs, the oldest run first. Files
without a run come first. A failed run does not count, so a file that failed keeps its position. One line for each file
is appended to the ledger tests/nightly.tsv, which is committed: file, commit, processor, result, seconds. A file whose
last run took longer than the time that is left is skipped. A file that still runs when the time is over is interrupted,
recorded as late, and goes to the end of the queue. It has up to two minutes more to remove what it started. `--check`
runs no tests. It prints a warning for each file of the ledger that has not passed for `STALE_COMMITS` commits.
"""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from rich.console import Console

from baton.modeling.kernels.processor import cpu_flags, processor_kind

ROOT = Path(__file__).parents[1]
LEDGER = ROOT / "tests" / "nightly.tsv"
HEADER = ("file", "commit", "processor", "result", "seconds")
STALE_COMMITS = 60
EXPRESSION = "ci or nightly"
PASSED, FAILED, LATE = "passed", "failed", "late"
_END_S = 120.0
"""Seconds that an interrupted test run has to remove what it started."""
_INSTRUCTIONS = {"amx_tile": "amx", "avx512_bf16": "avx512-bf16", "avx512f": "avx512", "avx2": "avx2"}
"""Processor features that kernels use, and the names for them in the ledger. The best feature comes first."""
_NOTHING_COLLECTED = 5


@dataclass(frozen=True)
class Run:
    """Line of the ledger. It records one run of one test file."""

    file: str
    commit: str
    processor: str
    result: str
    seconds: int


def main() -> int:
    """Run test files until the time limit is reached. Return 1 if a test file failed or was interrupted, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=40, help="time for the whole run, in minutes (default: 40)")
    parser.add_argument("--check", action="store_true", help="print a warning for each stale file, and run nothing")
    args = parser.parse_args()
    console = Console(stderr=True, highlight=False)
    runs = read_ledger(LEDGER.read_text() if LEDGER.exists() else "")
    if args.check:
        for line in stale_files(runs, _commit_ages()):
            console.print(f"warning: {line}", markup=False)
        return 0
    return _run_files(oldest_first(_collect(), runs), runs, args.minutes * 60, console)


def read_ledger(text: str) -> list[Run]:
    """Return the runs recorded in the text of a ledger, the oldest first."""
    rows = [line.split("\t") for line in text.splitlines()[1:]]
    return [Run(file, commit, processor, result, int(seconds)) for file, commit, processor, result, seconds in rows]


def oldest_first(files: Iterable[str], runs: Iterable[Run]) -> list[str]:
    """Return the test files in the order of their last runs that passed or were interrupted as late, the oldest run
    first. Files without such a run in the ledger come first, sorted by name."""
    ended = {run.file: place for place, run in enumerate(runs) if run.result != FAILED}
    return sorted(files, key=lambda file: (ended.get(file, -1), file))


def stale_files(runs: Iterable[Run], ages: Mapping[str, int]) -> list[str]:
    """Return one warning for each stale test file of the ledger, sorted by file. A file is stale if it has never
    passed, or if its last passing run is more than `STALE_COMMITS` commits old. Files that no longer exist are ignored.
    `ages` has, for each commit, the number of commits that were made after it."""
    passed: dict[str, int | None] = {}
    for run in runs:
        passed.setdefault(run.file, None)
        if run.result == PASSED:
            passed[run.file] = ages.get(run.commit, STALE_COMMITS + 1)
    lines = []
    for file, age in sorted(passed.items()):
        if not (ROOT / file).exists():
            continue
        if age is None:
            lines.append(f"{file} has not passed at night: run `make nightly`")
        elif age > STALE_COMMITS:
            lines.append(f"{file} last passed at night over {STALE_COMMITS} commits ago: run `make nightly`")
    return lines


def _run_files(files: list[str], runs: list[Run], limit_s: float, console: Console) -> int:
    expected_s = {run.file: run.seconds for run in runs}
    commit, processor, begin_s, failed = _commit(), _processor(), time.monotonic(), []
    for number, file in enumerate(files, 1):
        left_s = limit_s - (time.monotonic() - begin_s)
        if left_s <= 0:
            console.print(f"time is over: {len(files) - number + 1} files left for the next run")
            break
        if expected_s.get(file, 0) > left_s:
            console.print(f"[{number}/{len(files)}] {file} skipped: it takes {expected_s[file]} s", markup=False)
            continue
        console.print(f"[{number}/{len(files)}] {file}", markup=False)
        start_s = time.monotonic()
        result = _run_file(file, left_s)
        if result is None:
            continue
        _append(Run(file, commit, processor, result, round(time.monotonic() - start_s)))
        failed += [f"{result}: {file}"] if result != PASSED else []
    for line in failed:
        console.print(line, markup=False)
    return 1 if failed else 0


def _run_file(file: str, limit_s: float) -> str | None:
    """Run the tests of a file for at most `limit_s` seconds, and interrupt them after that. Return the result; None if
    the file has no such tests."""
    process = subprocess.Popen(_command(file, "--require-tools"), cwd=ROOT)
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return LATE
    finally:
        if process.poll() is None:
            _interrupt(process)
    return None if status == _NOTHING_COLLECTED else FAILED if status else PASSED


def _interrupt(process: "subprocess.Popen[bytes]") -> None:
    """Interrupt a test run, and end it if it does not stop within `_END_S` seconds."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _append(run: Run) -> None:
    if not LEDGER.exists():
        LEDGER.write_text("\t".join(HEADER) + "\n")
    with LEDGER.open("a") as ledger:
        ledger.write("\t".join(str(value) for value in astuple(run)) + "\n")


def _commit() -> str:
    """Return the last commit, followed by "+" if any file other than the ledger has uncommitted changes."""
    changed = _git("status", "--porcelain", "--", ":!tests/nightly.tsv")
    return _git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")


def _commit_ages() -> dict[str, int]:
    """Return the number of commits made after each commit of the history. Keys are the commits' names in the ledger."""
    names = _git("log", "--format=%H").split()
    return {name[:10] + mark: age for age, name in enumerate(names) for mark in ("", "+")}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, text=True, capture_output=True, check=True).stdout.strip()


def _processor() -> str:
    """Return the processor's name, and the best instruction set that it supports and kernels use."""
    best = next((name for flag, name in _INSTRUCTIONS.items() if flag in cpu_flags()), "plain")
    return f"{processor_kind().rpartition(' [')[0]} {best}"


def _collect() -> list[str]:
    """Return the test files that contain nightly tests."""
    run = subprocess.run(
        _command("--collect-only", "-q", "tests"), cwd=ROOT, text=True, capture_output=True, check=False
    )
    if run.returncode:
        raise SystemExit(run.stdout)
    return sorted({line.partition("::")[0] for line in run.stdout.splitlines() if "::" in line})


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-m", EXPRESSION, *arguments]


if __name__ == "__main__":
    sys.exit(main())
