"""Runs the tests marked `soak`, one file at a time, and goes on where the last run of the same commit ended.

Each file is a pytest of its own, so that an interrupted run loses one file at most. What passed is noted in
.cache/soak, in a file named after the commit; a tree with uncommitted changes notes nothing.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).parents[1]
NOTES = ROOT / ".cache" / "soak"
_NOTHING_COLLECTED = 5


def main() -> int:
    """Run what has not passed yet; return 1 when a file fails, once all have been run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart", action="store_true", help="run files again that passed on this commit")
    restart = parser.parse_args().restart
    console = Console(stderr=True, highlight=False)
    note = _note()
    passed = set(note.read_text().split()) if note is not None and note.exists() and not restart else set()
    files = [name for name in _soaking() if name not in passed]
    console.print(f"{len(files)} files to run, {len(passed)} passed earlier on this commit")
    failed = []
    for number, name in enumerate(files, 1):
        console.print(f"[{number}/{len(files)}] {name}", markup=False)
        status = _pytest(name).returncode
        if status not in (0, _NOTHING_COLLECTED):
            failed.append(name)
        elif note is not None:
            passed.add(name)
            NOTES.mkdir(parents=True, exist_ok=True)
            note.write_text("\n".join(sorted(passed)) + "\n")
    for name in failed:
        console.print(f"failed: {name}", markup=False)
    return 1 if failed else 0


def _note() -> Path | None:
    """Return where the files are noted that passed on this commit; None where files differ from it."""
    if _git("status", "--porcelain"):
        return None
    return NOTES / _git("rev-parse", "HEAD")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, text=True, capture_output=True, check=True).stdout.strip()


def _soaking() -> list[str]:
    """Return the test files that hold tests marked `soak`."""
    run = _pytest("--collect-only", "-q", "tests", capture=True)
    if run.returncode:
        raise SystemExit(run.stdout)
    return sorted({line.partition("::")[0] for line in run.stdout.splitlines() if "::" in line})


def _pytest(*arguments: str, capture: bool = False) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pytest", "-m", "soak", *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=capture, check=False)


if __name__ == "__main__":
    sys.exit(main())
