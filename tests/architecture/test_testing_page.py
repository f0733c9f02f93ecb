"""docs/testing.md names only tests that exist, each in a column whose lane runs it."""

import ast
import functools
import re
from collections.abc import Iterator

import pytest

from tests.support.folders import ROOT

PAGE = (ROOT / "docs/testing.md").read_text()
LEVELS = ["in process", "real processes", "Ray", "at night"]
TEST = re.compile(r"`([\w/]+\.py)::([\w:]+)(?:\[([^]]+)])?`")
NIGHT, CLUSTER = re.compile(r"mark\.(nightly|soak)\b"), re.compile(r"mark\.cluster\b")
OWN = "architecture/test_testing_page.py"


@functools.cache
def parsed(name: str) -> tuple[dict[str, ast.stmt], str]:
    """What a file below tests defines, by name, and its text; `ray/` stands for system/ray_cluster/."""
    path = ROOT / "tests" / re.sub("^ray/", "system/ray_cluster/", name)
    text = path.read_text() if path.is_file() else ""
    return defined(ast.parse(text).body), text


def defined(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    named = {
        each.name: each for each in body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    assigned = {ast.unparse(target): each for each in body if isinstance(each, ast.Assign) for target in each.targets}
    return {**named, **assigned}


def definition(name: str, test: str) -> ast.stmt | None:
    """A function, method or class, or what `TestWalk = Walk.TestCase` defines; None: it does not exist."""
    first, *inner = test.split("::")
    found = parsed(name)[0].get(first)
    for part in inner:
        found = defined(getattr(found, "body", [])).get(part)
    return found


def problem(level: str, name: str, test: str, case: str) -> str:
    """Why a cell of that level may not name that test; empty: it may."""
    found, (module, text) = definition(name, test), parsed(name)
    if found is None:
        return "does not exist"
    helpers = [
        parsed(f"{each.replace('.', '/')}.py")[1] for each in re.findall(r"from tests\.(support\S+) import", text)
    ]
    if case and f'"{case}"' not in "".join((text, *helpers)):
        return "has no such case"
    of_module = ast.unparse(module["pytestmark"]) if "pytestmark" in module else ""
    decorators = [ast.unparse(each) for each in getattr(found, "decorator_list", [])]
    of_all = " ".join((of_module, *(each for each in decorators if "parametrize(" not in each)))
    if level == "at night":
        return "" if NIGHT.search(of_all) or NIGHT.search(" ".join(decorators)) else "does not run at night"
    if NIGHT.search(of_all):
        return "runs at night only"
    is_on_ray = name.startswith("ray/") or bool(CLUSTER.search(of_all))
    return "" if is_on_ray == (level == "Ray") else f"{'runs' if is_on_ray else 'does not run'} on Ray"


def rows(text: str) -> Iterator[list[str]]:
    """What is guaranteed, and a cell for each level, of all rows below a header that ends with the levels."""
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if header[-4:] == LEVELS and cells and not cells[0].startswith("---"):
            yield [" ".join(cells[:-4]), *cells[-4:]]
        header = (header or cells) if cells else []


def problems(text: str) -> Iterator[str]:
    """What is wrong with a page."""
    for guarantee, *cells in rows(text):
        for level, cell in zip(LEVELS, cells, strict=True):
            if cell != "-" and TEST.sub("", cell).replace("<br>", ""):
                yield f"{guarantee}: {cell} is neither - nor a test"
            for name, test, case in TEST.findall(cell):
                if wrong := problem(level, name, test, case):
                    yield f"{guarantee}: {level}: {name}::{test} {wrong}"
        if not any(TEST.search(cell) for cell in cells[:-1]):
            yield f"{guarantee}: no test runs on a change"


def test_every_test_exists_and_runs_in_the_lane_of_its_column() -> None:
    assert len(list(rows(PAGE))) > 100
    assert [*problems(PAGE)] == []
    assert [each for each in TEST.findall(PAGE) if definition(*each[:2]) is None] == []


@pytest.mark.parametrize(
    ("cells", "wrong"),
    [
        (f"`{OWN}::test_renamed` | - | - | -", "does not exist"),
        (f"`{OWN}::problem[no {'case'}]` | - | - | -", "has no such case"),
        (f"- | - | `{OWN}::problem` | -", "does not run on Ray"),
        (f"`{OWN}::problem` | - | - | `{OWN}::problem`", "does not run at night"),
        ("- | RAY | - | -", "runs on Ray"),
        ("SOAK | - | - | -", "runs at night only"),
        ("- | - | - | SOAK", "no test runs on a change"),
        ("later | - | - | -", "neither - nor a test"),
    ],
)
def test_what_is_wrong_with_a_page_is_seen(cells: str, wrong: str) -> None:
    *_, ray, _ = zip(*rows(PAGE), strict=True)
    soak = "`faults/test_prefix_soak.py::test_churn`"
    cells = cells.replace("RAY", next(each for each in ray if each != "-")).replace("SOAK", soak)
    head = f"| guarantee | {' | '.join(LEVELS)} |\n|---|---|---|---|---|\n"
    assert any(wrong in found for found in problems(f"{head}| g | {cells} |\n"))
