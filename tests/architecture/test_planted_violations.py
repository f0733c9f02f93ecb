"""Each rule of our own in `make lint`, broken in one copy of the tree, makes its step fail and name the place.

All rules are broken at once, so that each step runs once. Of the imports, the section of the contract that forbids
one must name it: a contract that is gone is missed, although others name the same import as part of a longer chain.
"""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.support.folders import ROOT
from tests.support.lint import STEPS, copy_tree, run_step

pytestmark = pytest.mark.integration

IMPORTS = [
    ("transport", "baton/transport/channel.py", "ray"),
    ("transport", "baton/transport/coverage.py", "torch"),
    ("engines", "prefill_workers/engine.py", "grpc"),
    ("engines", "generate_workers/engine/core.py", "grpc"),
    ("engines", "generate_workers/slots/table.py", "baton.v1.kv_pb2"),
    ("engines", "generate_workers/slots/slot_access.py", "baton.transport.channel"),  # which imports grpc
    ("orchestrator", "orchestrator/dispatch/attempt.py", "grpc"),
    ("stubs", "orchestrator/scheduler.py", "baton.v1.kv_pb2"),
    ("orchestrator", "orchestrator/placement/options.py", "torch"),
    ("modeling", "baton/modeling/forward/decoder.py", "grpc"),
    ("modeling", "baton/modeling/forward/decoder.py", "baton.v1.kv_pb2"),
    ("words-and-plans", "baton/text/tokenizer.py", "torch"),
    ("words-and-plans", "baton/planning/chain/partition.py", "torch"),
    ("client", "baton/types.py", "torch"),
    ("ray", "benchmarks/support/harness.py", "ray"),
    ("ray", "prefill_workers/host.py", "ray"),
    ("floors-baton", "baton/text/tokenizer.py", "baton.modeling.forward.decoder"),
    ("floors-baton", "baton/planning/chain/partition.py", "baton.transport.channel"),
    ("layers", "prefill_workers/engine.py", "generate_workers.engine.core"),
    ("layers", "generate_workers/engine/core.py", "prefill_workers.engine"),
    ("layers", "orchestrator/dispatch/attempt.py", "prefill_workers.engine"),
    ("floors-baton", "baton/types.py", "baton.text.tokenizer"),
    ("layers", "baton/transport/channel.py", "deploy.config.worker"),
    ("servicers", "prefill_workers/engine.py", "prefill_workers.servicer"),
    ("floors-orchestrator", "orchestrator/requests/record.py", "orchestrator.api.frontend"),
]
"""A contract, a module, and what it may not import by that contract."""
ALLOWED = ("deploy/groups/roster.py", "ray")
CIRCLES = {
    "plain": "import {}",
    "typed": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {}",
    "late": "def late() -> None:\n    import {}",
}
"""Ways in which a module may import one that imports it."""
FILES = {
    "proto/__init__.py": "",
    "baton/v1/planted_pb2.py": "",
    "baton/planning/long_file.py": "x = 1\n" * 401,
    "baton/planning/long_function.py": "def long():\n" + "    x = 1\n" * 60,
    "baton/planning/wide.py": "class A:\n    def wide(self, a, b, c, d, e, f): ...\n",
    "baton/planning/full.py": "def full(a, b, c, d, e, *, f):\n" + "    x = 1\n" * 59 + "x = 1\n" * 340,
}
PROTO = "proto/baton/v1/common.proto"
NAMED = [
    ("stubs", "baton/v1/common_pb2.py: stale stub"),
    ("stubs", "baton/v1/planted_pb2.py: no proto makes this stub"),
    ("stubs", "proto/__init__.py: proto/ holds .proto files only"),
    ("sizes", "baton/planning/long_file.py: 401 lines (the limit is 400)"),
    ("sizes", "baton/planning/long_function.py:1 long: 61 lines (the limit is 60)"),
    ("sizes", "baton/planning/wide.py:2 wide: 6 positional parameters (the limit is 5)"),
]
"""A step, and the beginning of the line in which it names what was planted."""
PROSE = [
    ('NUM = 1\n"""Of a choice."""', "2 docstring few-words: 'Of a choice.'"),
    ('NUM = 1\n"""Of the choices of a request."""', "2 docstring start: 'Of'"),
    ("NUM = 1  # what nobody waits for", "1 comment nobody: 'nobody'"),
    ('TEXT = "the file is no folder"', "1 string is-no: 'is no'"),
]
"""Lines of a module, and the hit that is named."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree in which all rules are broken."""
    tree = copy_tree(tmp_path_factory.mktemp("tree"))
    for module, imported in (*((module, imported) for _, module, imported in IMPORTS), ALLOWED):
        add(tree / module, f"\nimport {imported}\n")
    for name, line in CIRCLES.items():
        folder = tree / "baton" / "text" / name
        folder.mkdir()
        add(folder / "__init__.py", "")
        add(folder / "one.py", f"import baton.text.{name}.two\n")
        add(folder / "two.py", line.format(f"baton.text.{name}.one"))
    for name, text in FILES.items():
        add(tree / name, text)
    for number, (text, _) in enumerate(PROSE):
        add(tree / f"baton/planning/said_{number}.py", text + "\n")
    add(tree / "docs/planted.md", "# Planted\n\nA page beside\nthe others.\n")
    add(tree / PROTO, "\nmessage Planted {\n  uint32 field = 1;\n}\n")
    return tree


def add(path: Path, text: str) -> None:
    """Add text at the end of a file, which may not exist yet."""
    with path.open("a") as file:
        file.write(text)


@pytest.fixture(scope="module")
def outputs(tree: Path) -> dict[str, str]:
    """Output of each lint step, which refuses the tree."""
    results = {step: run_step(step, tree) for step in STEPS}
    assert [result.returncode for result in results.values()] == [1] * len(STEPS), results
    return {step: result.stdout for step, result in results.items()}


@pytest.fixture(scope="module")
def sections(outputs: dict[str, str]) -> dict[str, str]:
    """Output of lint-imports about each broken contract, by the id of the contract."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    ids = {contract["name"]: contract["id"] for contract in contracts}
    _, *parts = re.split(r"^(.+)\n-{3,}$", outputs["imports"], flags=re.MULTILINE)
    return {ids[title]: text for title, text in zip(parts[::2], parts[1::2], strict=True) if title in ids}


@pytest.mark.parametrize("step", STEPS)
def test_make_lint_runs_the_step(step: str) -> None:
    command = ["make", "-n", "lint", "VENV=.venv"]
    recipe = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout
    assert " ".join((f".venv/bin/{STEPS[step][0]}", *STEPS[step][1:])) in recipe.splitlines()


@pytest.mark.parametrize(("contract", "module", "imported"), IMPORTS)
def test_a_forbidden_import_is_named(contract: str, module: str, imported: str, sections: dict[str, str]) -> None:
    assert f" {dotted(module)} -> {imported} (" in sections[contract]


@pytest.mark.parametrize("name", CIRCLES)
def test_a_circle_of_imports_is_named(name: str, sections: dict[str, str]) -> None:
    assert f"No cycles are allowed in baton.text.{name}." in sections["circles"]


def test_ray_is_allowed_in_deploy(outputs: dict[str, str]) -> None:
    module, imported = ALLOWED
    assert f"{dotted(module)} -> {imported}" not in outputs["imports"]


@pytest.mark.parametrize(("step", "named"), NAMED)
def test_what_a_step_refuses_is_named(step: str, named: str, outputs: dict[str, str]) -> None:
    assert any(line.startswith(named) for line in outputs[step].splitlines())


@pytest.mark.parametrize("number", range(len(PROSE)))
def test_wording_that_the_style_replaces_is_named(number: int, outputs: dict[str, str]) -> None:
    assert f"baton/planning/said_{number}.py:{PROSE[number][1]}" in outputs["prose"]


def test_wording_in_a_new_document_is_named(outputs: dict[str, str]) -> None:
    assert "docs/planted.md:3 document beside: 'beside'" in outputs["prose"]


def test_sizes_at_the_limits_pass(outputs: dict[str, str]) -> None:
    assert "baton/planning/full.py" not in outputs["sizes"]


def dotted(module: str) -> str:
    return module.removesuffix(".py").replace("/", ".")
