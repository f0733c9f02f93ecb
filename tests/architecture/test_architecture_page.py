"""ARCHITECTURE.md is true of the code: its steps, folders, floors and threads are those that there are.

The steps of a request's way are numbered there and nowhere else: step 3.2 is the second of stage 3. Module docstrings
name their neighbours.
"""

import itertools
import re
import tomllib

from tests.support.folders import ROOT

PAGE = (ROOT / "ARCHITECTURE.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = [name.removesuffix(".*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]]
NUMBERED = re.compile(r"[Ss]teps? \d[^.:;]*? of a\s+request's\s+way")
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


def test_steps_are_numbered_nowhere_else() -> None:
    every = [path for top in tops() for path in (ROOT / top).rglob("*.py") if "_pb2" not in path.name]
    assert [str(path.relative_to(ROOT)) for path in every if NUMBERED.search(path.read_text())] == []


def test_a_numbered_step_is_seen() -> None:
    assert NUMBERED.search("Step 3 of a request's way.")
    assert NUMBERED.search("(steps 3 to 6 of a\nrequest's way)")
    assert not NUMBERED.search("It takes 2 steps of a batch.")


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
