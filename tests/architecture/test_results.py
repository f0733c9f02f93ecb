"""Committed results of benchmarks: a folder for each kind of processor, one file for each benchmark, and a page."""

import json
import re
from pathlib import Path

from tests.support.folders import ROOT

RESULTS = ROOT / "benchmarks/results"
NOT_ROWS = {"quality.json", "bench.json"}
"""What `baton evaluate` and `baton bench` wrote, which are no benchmarks."""


def test_every_file_of_rows_is_named_after_its_benchmark() -> None:
    files = [path for path in RESULTS.rglob("*.json") if path.name not in NOT_ROWS]
    assert files
    for path in files:
        name = path.stem if path.parent.parent == RESULTS else path.parent.name
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert {row["bench"] for row in rows} == {name}, path
        assert (ROOT / "benchmarks" / f"{name}.py").is_file(), path


def test_a_row_stands_once_in_its_file() -> None:
    for path in RESULTS.rglob("*.json"):
        if path.name not in NOT_ROWS:
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            keys = [(row["case"], row["metric"], row["baseline"]) for row in rows]
            assert len(keys) == len(set(keys)), path


def test_the_index_links_a_page_for_every_kind() -> None:
    linked = links(RESULTS / "README.md")
    assert {path.parent for path in linked} == {path for path in RESULTS.iterdir() if path.is_dir()}
    assert all(path.is_file() for path in linked)


def test_every_plot_is_shown_by_a_page() -> None:
    shown = {target for page in RESULTS.rglob("*.md") for target in links(page)}
    plots = {*RESULTS.rglob("*.png")}
    assert plots
    assert plots - shown == set()


def links(page: Path) -> set[Path]:
    """Return the files that a page links."""
    targets = re.findall(r"\]\(([^)\s#]+)\)", page.read_text())
    return {(page.parent / target).resolve() for target in targets if "://" not in target}
