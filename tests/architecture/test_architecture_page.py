"""ARCHITECTURE.md is true of the code: its steps, folders, floors and threads are those that there are.

The steps of a request's way are numbered there and nowhere else: step 3.2 is the second of stage 3. Module docstrings
name the stage ("Step 3 of a request's way").
"""

import ast
import itertools
import re
import tomllib
from collections import defaultdict
from pathlib import Path

from tests.support.folders import ROOT

PAGE = (ROOT / "ARCHITECTURE.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = [name.removesuffix(".*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]]
STAGE = re.compile(r"((?:[Ss]teps?|[Ff]irst|[Ll]ast)\b[^.:;()]*?) of a request's\s+way")
MOST_COLUMNS = 100


def test_the_steps_of_a_request_are_numbered_without_gaps() -> None:
    numbers = [tuple(map(int, step.split("."))) for step, _ in steps()]
    assert len({stage for stage, _ in numbers}) > 1
    for before, after in itertools.pairwise(numbers):
        assert after in ((before[0], before[1] + 1), (before[0] + 1, 1)), after
    assert numbers[0] == (1, 1)


def test_every_step_names_a_file_that_there_is() -> None:
    missing = [f"{step}: {name}" for step, name in steps() if not (ROOT / name).is_file()]
    assert missing == []


def test_a_module_says_that_it_belongs_to_the_stage_that_the_table_gives_it() -> None:
    stages: defaultdict[str, set[int]] = defaultdict(set)
    for step, name in steps():
        stages[name].add(int(step.split(".")[0]))
    said = {name: stages_said(ROOT / name) for name in stages}
    assert sum(bool(each) for each in said.values()) > len(said) / 2
    wrong = {
        name: (sorted(stages[name]), sorted(each)) for name, each in said.items() if each and not stages[name] <= each
    }
    assert wrong == {}, "(in the table, in the docstring)"


def test_no_module_names_a_stage_that_the_table_lacks() -> None:
    last = int(steps()[-1][0].split(".")[0])
    every = [path for top in tops() for path in (ROOT / top).rglob("*.py") if "_pb2" not in path.name]
    said = {str(path.relative_to(ROOT)): stages_said(path) for path in every}
    assert {name: sorted(each) for name, each in said.items() if not each <= {*range(1, last + 1)}} == {}


def test_what_a_docstring_says_of_stages_is_understood(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    for text, stages in {
        "Step 3 of a request's way.": {3},
        "Steps 3, 6 and 7 of a request's\nway.": {3, 6, 7},
        "(steps 3 to 6 of a request's way)": {3, 4, 5, 6},
        "First and last step of a request's way.": {1, 9},
        "Before step 1 of a request's way.": set(),
        "It has 2 steps.": set(),
    }.items():
        module.write_text(f'"""{text}"""\n')
        assert stages_said(module) == stages, text


def test_every_package_and_folder_of_the_wheel_is_in_the_table_of_folders() -> None:
    folders = {
        str(path.parent.relative_to(ROOT)) for top in tops() for path in sorted((ROOT / top).rglob("__init__.py"))
    }
    assert {row[0].strip("`") for row in rows("Folders")} == folders


def test_the_floors_are_those_that_import_linter_holds() -> None:
    contracts = [each for each in PROJECT["tool"]["importlinter"]["contracts"] if each["id"].startswith("floors-")]
    held = {
        each["containers"][0]: [sorted(re.split(r" [|:] ", floor)) for floor in each["layers"]] for each in contracts
    }
    shown = {
        package.strip("`"): [sorted(re.findall(r"`(\w+)`", floor)) for floor in floors.split(" > ")]
        for package, floors, *_ in rows("Floors")
    }
    assert shown == held


def test_every_thread_is_started_by_the_file_that_is_said_to() -> None:
    threads = [
        (name, file)
        for _, names, file, _ in rows("Threads and processes")
        for name in code(names)
        for file in code(file)
    ]
    assert len(threads) > 5
    assert [name for name, file in threads if name not in (ROOT / file).read_text()] == []


def test_the_design_numbers_no_steps_of_its_own() -> None:
    assert re.findall(r"^\d+\. .*", (ROOT / "DESIGN.md").read_text(), re.MULTILINE) == []


def test_lines_of_prose_are_short() -> None:
    long = [line for line in PAGE.splitlines() if len(line) > MOST_COLUMNS and not line.startswith("|")]
    assert long == []


def tops() -> list[str]:
    """The packages of the wheel."""
    return sorted(set(PACKAGES))


def section(title: str) -> str:
    """Return the text below a heading of the page, up to the next of the same level."""
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return str(text)


def rows(title: str) -> list[list[str]]:
    """Return the cells of the section's tables, without their heads."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rules = [number for number, row in enumerate(cells) if set(row[0]) <= {"-"} and row[0]]
    assert rules, f"no table below {title!r}"
    return [row for number, row in enumerate(cells) if number not in rules and number + 1 not in rules]


def steps() -> list[tuple[str, str]]:
    """Return number and file of every step of a request's way."""
    return [(row[0], code(row[1])[0]) for row in rows("A request's way") if re.fullmatch(r"\d+\.\d+", row[0])]


def code(cell: str) -> list[str]:
    """Return what stands between backticks."""
    return re.findall(r"`([^`]+)`", cell)


def stages_said(path: Path) -> set[int]:
    """Return the stages of a request's way that the module's docstring says it belongs to."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    stages: set[int] = set()
    for match in STAGE.finditer(text):
        if text[: match.start()].lower().endswith(("before ", "off ")):
            continue
        said = match[1]
        for first, last in re.findall(r"(\d+) to (\d+)", said):
            stages |= {*range(int(first), int(last) + 1)}
        stages |= {int(number) for number in re.findall(r"\d+", said)}
        stages |= {1} if "first" in said.lower() else set()
        stages |= {9} if "last" in said.lower() else set()
    return stages
