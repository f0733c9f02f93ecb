"""docs/testing.md names only tests that exist, each in a column whose lane runs it."""

import ast
import functools
import re
from collections.abc import Iterator

import pytest

from tests.support.folders import ROOT
from tests.support.guards.lanes import lane_of

PAGE = (ROOT / "docs/testing.md").read_text()
LEVELS = ["in process", "real processes", "Ray", "at night"]
LANES = [("unit", "integration"), ("integration",), ("cluster",), ("unit", "integration", "cluster")]
TEST = re.compile(r"`([\w/]+\.py)::([\w:]+)(?:\[([^]]+)])?`")
OWN = "architecture/test_testing_page.py"


@functools.cache
def parsed(name: str) -> tuple[ast.AST | None, str, str]:
    """A file below tests, its text and its lane; `ray/` stands for system/ray_cluster/."""
    path = ROOT / "tests" / re.sub("^ray/", "system/ray_cluster/", name)
    text = path.read_text() if path.is_file() else ""
    return ast.parse(text), text, lane_of(path) if text else ""


@functools.cache
def defined(node: ast.AST | None) -> dict[str, ast.AST]:
    """Definitions of a module or class by name, including `TestWalk = Walk.TestCase`."""
    named = [(getattr(each, "name", ""), each) for each in getattr(node, "body", [])]
    return dict([*named, *((ast.unparse(name), each) for _, each in named for name in getattr(each, "targets", ()))])


def definition(name: str, test: str) -> ast.AST | None:
    return functools.reduce(lambda found, part: defined(found).get(part), test.split("::"), parsed(name)[0])


def problem(level: str, name: str, test: str, case: str) -> str:
    """Why a cell of that level may not name that test; empty: it may."""
    found, (module, text, lane) = definition(name, test), parsed(name)
    if found is None:
        return "does not exist"
    support = [each.replace(".", "/") for each in re.findall(r"from tests\.(support\S+) import", text)]
    if case and not any(f'"{case}"' in each for each in (text, *(parsed(f"{name}.py")[1] for name in support))):
        return "has no such case"
    of_module = ast.unparse(defined(module).get("pytestmark", ast.Pass()))
    decorators = [ast.unparse(each) for each in getattr(found, "decorator_list", [])]
    of_all = " ".join((of_module, *(each for each in decorators if "parametrize(" not in each)))
    is_at_night = "mark.nightly" in of_all or (level == "at night" and "mark.nightly" in " ".join(decorators))
    if is_at_night != (level == "at night"):
        return "runs at night only" if is_at_night else "does not run at night"
    return "" if lane in LANES[LEVELS.index(level)] else f"is of the lane {lane}"


def rows(text: str) -> Iterator[list[str]]:
    """Rows below each header that ends with the levels: the guarantee and one cell for each level."""
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if header[-4:] == LEVELS and cells and not cells[0].startswith("---"):
            yield [" ".join(cells[:-4]), *cells[-4:]]
        header = (header or cells) if cells else []


def problems(text: str) -> Iterator[str]:
    for guarantee, *cells in rows(text):
        for level, cell in zip(LEVELS, cells, strict=True):
            if cell != "-" and TEST.sub("", cell):
                yield f"{guarantee}: {cell} is neither - nor a test"
            for name, *test in TEST.findall(cell):
                if wrong := problem(level, name, *test):
                    yield f"{guarantee}: {level}: {name}::{test[0]} {wrong}"
        if not any(TEST.search(cell) for cell in cells[:-1]):
            yield f"{guarantee}: no test runs on a change"


def test_every_test_exists_and_runs_in_the_lane_of_its_column() -> None:
    assert ([*problems(PAGE)], len([*rows(PAGE)]) > 100) == ([], True)
    assert [each for each in TEST.findall(PAGE) if definition(*each[:2]) is None] == []


@pytest.mark.parametrize(
    ("cells", "wrong"),
    [
        (f"`{OWN}::test_renamed` | - | - | -", "does not exist"),
        (f"`{OWN}::problem[no {'case'}]` | - | - | -", "has no such case"),
        (f"- | - | `{OWN}::problem` | -", "is of the lane unit"),
        (f"- | - | - | `{OWN}::problem`", "does not run at night"),
        ("- | - | - | `faults/test_prefix_soak.py::test_churn`", "no test runs on a change"),
        ("- | RAY | - | -", "is of the lane cluster"),
        ("`faults/test_prefix_soak.py::test_churn` | - | - | -", "runs at night only"),
        ("later | - | - | -", "neither - nor a test"),
    ],
)
def test_what_is_wrong_with_a_page_is_seen(cells: str, wrong: str) -> None:
    *_, ray, _ = zip(*rows(PAGE), strict=True)
    cells = cells.replace("RAY", next(each for each in ray if each != "-"))
    assert any(wrong in found for found in problems(f"| guarantee | {' | '.join(LEVELS)} |\n| g | {cells} |\n"))
