"""Documents name only what exists: commands, options, configuration fields, modules, files, and pages of docs/gaps.md.

`docs/gaps.md` lists what is missing; DESIGN.md marks it `[not built: NAME]`, where NAME is the heading of its page.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.errors import BatonError
from deploy.cli import build_parser
from deploy.config.cluster import ClusterConfig
from deploy.config.file import load_config
from tests.support.folders import ROOT

DOCUMENTS = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md")) + sorted((ROOT / "benchmarks/results").rglob("*.md"))
GAPS = ROOT / "docs/gaps.md"
CAPABILITIES, BARS = "\n## Capabilities that are missing", "\n## Bars that are missed"
PARTS = ("**Aim**", "**Exists**", "**Missing**", "**To close**")
PACKAGES = "baton|baton_lab|benchmarks|deploy|generate_workers|orchestrator|prefill_workers"
SECTIONS: dict[str, Any] = {each.name: each.type for each in fields(ClusterConfig) if is_dataclass(each.type)}
NAME = rf"(?<![\w/.])(?:{'|'.join(SECTIONS)}|{PACKAGES}|gateway)(?:\.\w+)+\b(?!\*)"
ABSENT = [
    ("Speculation", PACKAGES, r"(?i)pq_?cache"),
    ("GPUs", PACKAGES, r"cudaHostRegister"),
    ("TLS", PACKAGES, r"add_secure_port|ssl_server_credentials|ssl_channel_credentials"),
    ("HTTP", PACKAGES, r"^\s*(import|from) (fastapi|starlette|uvicorn)"),
]
"""A page of docs/gaps.md, and what packages that close it would contain: then the page has to go."""

pages = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@pages
def test_every_command_line_is_one_that_baton_takes(path: Path) -> None:
    for line in path.read_text().splitlines():
        command = re.match(r"\s*(?:\.venv/bin/)?baton ([a-z].*)", line)
        if command is None or not (line.startswith((".venv", "baton", "    baton"))):
            continue
        words = shlex.split(command[1].split(" < ")[0], comments=True)
        problem = refusal(words)
        assert not problem, f"{line.strip()}: {problem}"


@pages
def test_every_command_in_a_sentence_exists(path: Path) -> None:
    named = set(re.findall(r"`(?:\.venv/bin/)?baton ([a-z]+)", path.read_text()))
    assert named <= commands()


@pages
def test_every_dotted_name_is_a_module_a_name_in_one_or_a_field(path: Path) -> None:
    names = re.findall(NAME, " ".join(code_spans(path)))
    assert [name for name in names if not exists(name) and not name.endswith((".NAME", ".json"))] == []


@pages
def test_every_file_exists(path: Path) -> None:
    text = path.read_text()
    named = {name for span in code_spans(path) for name in span.split() if is_file_name(name)}
    linked = {target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target}
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [target for target in linked if target and not (path.parent / target).exists()]
    assert missing == []


def test_the_index_of_documents_links_every_page_and_the_readme_links_the_index() -> None:
    index = set(re.findall(r"\]\(([^)#]+)\)", (ROOT / "docs/README.md").read_text()))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert pages - index == set()
    linked = set(re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()))
    assert {"ARCHITECTURE.md", "DESIGN.md", "CONTRIBUTING.md", "docs/README.md"} <= linked


def test_readme_and_design_name_the_benchmarks_that_there_are() -> None:
    named = set(re.findall(r"-m benchmarks\.(\w+)", "".join(each.read_text() for each in DOCUMENTS))) - {"NAME"}
    assert named
    assert [name for name in named if not (ROOT / "benchmarks" / f"{name}.py").is_file()] == []


def test_the_contents_of_gaps_list_every_page_in_order() -> None:
    contents, listed = GAPS.read_text().split(CAPABILITIES)[0], headings(CAPABILITIES, BARS) + headings(BARS)
    rows = re.findall(r"^\| \[([^\]]+)\]\(#([^)]+)\) \|", contents, re.MULTILINE)
    assert [title for title, _ in rows] == listed
    assert [anchor for _, anchor in rows] == [anchor_of(title) for title in listed]


def test_every_capability_states_its_aim_what_exists_what_is_missing_and_what_would_close_it() -> None:
    text = GAPS.read_text().split(CAPABILITIES)[1].split(BARS)[0]
    for page in text.split("\n### ")[1:]:
        assert [part for part in PARTS if part not in page] == [], page.splitlines()[0]


def test_what_the_design_marks_as_not_built_has_a_page_in_gaps() -> None:
    marked = re.findall(r"\[not built: ([^\]]+)\]", (ROOT / "DESIGN.md").read_text().replace("\n", " "))
    names = {" ".join(name.split()) for mark in marked for name in mark.split(";")} - {"NAME"}
    assert names
    assert names <= {*headings(CAPABILITIES, BARS)}


@pytest.mark.parametrize(("page", "packages", "pattern"), ABSENT, ids=[page for page, *_ in ABSENT])
def test_what_gaps_calls_missing_is_missing(page: str, packages: str, pattern: str) -> None:
    assert page in headings(CAPABILITIES, BARS)
    sources = [path for name in packages.split("|") for path in (ROOT / name).rglob("*.py") if "_pb2" not in path.name]
    assert sources
    found = [str(path) for path in sources if re.search(pattern, path.read_text(), re.MULTILINE)]
    assert found == [], f"mend the page {page!r} of docs/gaps.md"


def test_these_checks_see_what_does_not_exist() -> None:
    assert not exists("baton.modeling.forward.attention.NoSuchName") and not exists("generate.no_such_field")
    assert (
        exists("baton.modeling.forward.attention.Attention")
        and exists("generate.residency")
        and exists("baton.v1.Orchestrator")
    )
    assert refusal(["no_such_command"]) and refusal(["serve", "--set", "generate.no_such=1"])
    assert not refusal(["serve", "--set", "generate.num_slots=4"])


def commands() -> set[str]:
    """Those that the command line knows."""
    (choices,) = [action.choices for action in build_parser()._actions if action.choices]
    return {*choices}


def refusal(words: list[str]) -> str:
    """Why the command line, or the configuration that it sets, is refused; empty: it is not."""
    try:
        args = build_parser().parse_args(words)
    except SystemExit as end:
        return f"exit status {end.code}" if end.code else ""
    try:
        load_config(None, getattr(args, "set", []))
    except BatonError as error:
        return str(error)
    return ""


def code_spans(path: Path) -> Iterator[str]:
    """What stands between backticks."""
    yield from re.findall(r"`([^`\n]+)`", path.read_text())


def exists(name: str) -> bool:
    """Whether a dotted name is a field of the configuration, a module, a name in a module, or a gRPC service."""
    head, *rest = name.split(".")
    if head in SECTIONS and rest[0] in {each.name for each in fields(SECTIONS[head])}:
        return True
    if name.startswith("baton.v1."):
        protos = "".join(path.read_text() for path in (ROOT / "proto/baton/v1").glob("*.proto"))
        return f"service {rest[-1]} " in protos
    return any(holds(ROOT.joinpath(head, *rest[:cut]), rest[cut:]) for cut in range(len(rest), -1, -1))


def holds(module: Path, names: list[str]) -> bool:
    """Whether that path is a module or package, and defines the first of the names, if there is one."""
    source = module.with_suffix(".py") if module.with_suffix(".py").is_file() else module / "__init__.py"
    if not source.is_file():
        return False
    if not names:
        return True
    defined = rf"^\s*(?:(?:async )?def |class ){names[0]}\b|^\s*\"?{names[0]}\"?\s*[:=,]"
    return re.search(defined, source.read_text(), re.MULTILINE) is not None


def is_file_name(span: str) -> bool:
    """Whether a span of code names a file of the project, or a result by its date, which no file of results has."""
    top = {path.name for path in ROOT.iterdir() if path.is_dir()}
    in_tree = re.fullmatch(r"(\w[\w.-]*)/[\w./-]+\.\w+", span)
    return bool((in_tree and in_tree[1] in top) or re.fullmatch(r"\d{4}-\d\d-\d\d[\w.-]*\.(md|json|png|txt)", span))


def headings(start: str, end: str = "\n## NONE") -> list[str]:
    """Titles of the pages of docs/gaps.md between two parts."""
    return re.findall(r"^### (.+)$", GAPS.read_text().split(start)[-1].split(end)[0], re.MULTILINE)


def anchor_of(title: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
