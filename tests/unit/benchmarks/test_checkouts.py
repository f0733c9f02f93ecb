"""The comparison of two checkouts, on folders that hold a benchmark of one row."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import checkouts

pytestmark = pytest.mark.integration

ROW = '{{"bench": "one", "case": "tokens=1", "metric": "{metric}", "value": {value}, "unit": "ms", "ratio": 1.0}}'


def checkout(folder: Path, value: float, *, metric: str = "step_ms") -> Path:
    """Make a repository whose only benchmark prints its options on standard error and one row."""
    (folder / "benchmarks").mkdir(parents=True)
    row = ROW.format(metric=metric, value=value)
    (folder / "benchmarks" / "one.py").write_text(f"import sys\nprint(sys.argv[1:], file=sys.stderr)\nprint('{row}')\n")
    (folder / "benchmarks" / "none.py").write_text("raise SystemExit('nothing to measure')\n")
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "one"]):
        subprocess.run(["git", "-C", str(folder), *command], check=True)
    return folder


def compare(here: Path, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "argv", ["checkouts", *arguments])
    return checkouts.main()


def test_every_row_is_compared_with_the_other_checkouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = checkout(tmp_path / "here", 10.0), checkout(tmp_path / "there", 20.0)
    assert compare(here, "--json", "--pairs", "2", str(there), "one", monkeypatch=monkeypatch) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert '"value": 10.0' in line and '"baseline_value": 20.0' in line and '"ratio": 2.0' in line
    assert f'"baseline": "{checkouts.commit_of(there)}"' in line


@pytest.mark.parametrize(
    ("values", "metric", "status"),
    [((10, 9.6), "step_ms", 0), ((10, 9.4), "step_ms", 1), ((9.4, 10), "tokens_s", 1), ((9.4, 10), "step_ms", 0)],
)
def test_the_bar_is_a_ratio_that_knows_what_is_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: tuple[float, float], metric: str, status: int
) -> None:
    here = checkout(tmp_path / "here", values[0], metric=metric)
    there = checkout(tmp_path / "there", values[1], metric=metric)
    assert compare(here, "--bars", "--pairs", "1", str(there), "one", monkeypatch=monkeypatch) == status


def test_a_benchmark_without_rows_is_an_error_with_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = checkout(tmp_path / "here", 1.0)
    with pytest.raises(SystemExit, match=r"benchmarks\.none ended with status 1 and no row:\nnothing to measure"):
        compare(here, str(here), "none", monkeypatch=monkeypatch)
