"""Each rule of our own in `make lint`, broken in a copy of the tree, makes its step fail and name the place."""

import subprocess
from pathlib import Path

import pytest

from tests.support.folders import ROOT
from tests.support.lint import STEPS, copy_tree, run_step

pytestmark = pytest.mark.integration


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return copy_tree(tmp_path)


def plant(path: Path, line: str) -> None:
    """Adds a line at the end of a module, which may not exist yet."""
    text = path.read_text() if path.exists() else '"""New."""\n'
    path.write_text(f"{text}\n{line}\n")


@pytest.mark.parametrize("step", STEPS)
def test_the_tree_itself_is_clean(step: str, tree: Path) -> None:
    result = run_step(step, tree)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("step", STEPS)
def test_make_lint_runs_the_step(step: str) -> None:
    command = ["make", "-n", "lint", "VENV=.venv"]
    recipe = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout
    assert " ".join((f".venv/bin/{STEPS[step][0]}", *STEPS[step][1:])) in recipe.splitlines()


@pytest.mark.parametrize(
    ("module", "line", "named"),
    [
        ("transport/channel.py", "import ray", "transport.channel -> ray"),
        ("transport/coverage.py", "import torch", "transport.coverage -> torch"),
        ("prefill_workers/engine.py", "import grpc", "prefill_workers.engine -> grpc"),
        ("generate_workers/engine/core.py", "import grpc", "generate_workers.engine.core -> grpc"),
        ("generate_workers/engine/core.py", "import transport.channel", "transport.channel -> grpc"),
        (
            "generate_workers/slots/table.py",
            "import baton.v1.kv_pb2",
            "generate_workers.slots.table -> baton.v1.kv_pb2",
        ),
        ("orchestrator/dispatch/attempt.py", "import grpc", "orchestrator.dispatch.attempt -> grpc"),
        ("orchestrator/controller.py", "import baton.v1.kv_pb2", "orchestrator.controller -> baton.v1.kv_pb2"),
        ("orchestrator/placement/comparison.py", "import torch", "orchestrator.placement.comparison -> torch"),
        ("modeling/forward/decoder.py", "import grpc", "modeling.forward.decoder -> grpc"),
        ("modeling/forward/decoder.py", "import baton.v1.kv_pb2", "modeling.forward.decoder -> baton.v1.kv_pb2"),
        ("text/tokenizer.py", "import torch", "text.tokenizer -> torch"),
        ("planning/chain/partition.py", "import torch", "planning.chain.partition -> torch"),
        ("baton/types.py", "import torch", "baton.types -> torch"),
        ("benchmarks/support/harness.py", "import ray", "benchmarks.support.harness -> ray"),
    ],
)
def test_a_forbidden_library_is_named(module: str, line: str, named: str, tree: Path) -> None:
    plant(tree / module, line)
    assert_broken(run_step("imports", tree), named)


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("text/tokenizer.py", "modeling.forward.decoder"),
        ("planning/chain/partition.py", "transport.channel"),
        ("prefill_workers/engine.py", "generate_workers.engine.core"),
        ("generate_workers/engine/core.py", "prefill_workers.engine"),
        ("orchestrator/dispatch/attempt.py", "prefill_workers.engine"),
    ],
)
def test_an_import_among_siblings_is_named(module: str, imported: str, tree: Path) -> None:
    plant(tree / module, f"import {imported}")
    assert_broken(run_step("imports", tree), f"{module[:-3].replace('/', '.')} -> {imported}")


@pytest.mark.parametrize(
    ("module", "imported"), [("baton/types.py", "text.tokenizer"), ("transport/channel.py", "deploy.config.worker")]
)
def test_an_import_upward_is_named(module: str, imported: str, tree: Path) -> None:
    plant(tree / module, f"import {imported}")
    assert_broken(run_step("imports", tree), f"{module[:-3].replace('/', '.')} -> {imported}")


def test_an_engine_that_imports_its_servicer_is_named(tree: Path) -> None:
    plant(tree / "prefill_workers/servicer.py", "")
    plant(tree / "prefill_workers/engine.py", "import prefill_workers.servicer")
    assert_broken(run_step("imports", tree), "prefill_workers.engine -> prefill_workers.servicer")


def test_a_folder_that_imports_one_above_it_is_named(tree: Path) -> None:
    plant(tree / "orchestrator/requests/record.py", "import orchestrator.api.frontend")
    assert_broken(run_step("imports", tree), "orchestrator.requests.record -> orchestrator.api.frontend")


@pytest.mark.parametrize(
    "line",
    [
        "import deploy.forecasts.plan",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import deploy.forecasts.plan",
        "def late() -> None:\n    import deploy.forecasts.plan",
    ],
    ids=["plain", "for type checkers", "in a function"],
)
def test_a_circle_of_imports_is_named(line: str, tree: Path) -> None:
    plant(tree / "deploy/forecasts/plan_plot.py", line)
    result = run_step("imports", tree)
    assert_broken(result, "No cycles are allowed in deploy.forecasts.")
    assert ".plan_plot -> .plan" in result.stdout or ".plan -> .plan_plot" in result.stdout


def test_an_engines_host_that_imports_ray_is_named(tree: Path) -> None:
    plant(tree / "prefill_workers/host.py", "import ray")
    assert_broken(run_step("imports", tree), "prefill_workers.host -> ray")


def test_ray_is_allowed_in_deploy(tree: Path) -> None:
    plant(tree / "deploy/groups/roster.py", "import ray")
    result = run_step("imports", tree)
    assert result.returncode == 0, result.stdout


def test_a_proto_changed_without_regenerating_is_named(tree: Path) -> None:
    proto = tree / "proto/baton/v1/common.proto"
    proto.write_text(proto.read_text() + "\nmessage Planted {\n  uint32 field = 1;\n}\n")
    assert_broken(run_step("stubs", tree), "baton/v1/common_pb2.py: stale stub")


def test_a_stub_without_a_proto_is_named(tree: Path) -> None:
    (tree / "baton/v1/planted_pb2.py").touch()
    assert_broken(run_step("stubs", tree), "baton/v1/planted_pb2.py: no proto makes this stub")


def test_a_package_marker_in_proto_is_named(tree: Path) -> None:
    (tree / "proto/__init__.py").touch()
    assert_broken(run_step("stubs", tree), "proto/__init__.py: proto/ holds .proto files only")


def test_a_file_of_401_lines_is_named(tree: Path) -> None:
    (tree / "planning/planted.py").write_text("x = 1\n" * 401)
    assert_broken(run_step("sizes", tree), "planning/planted.py: 401 lines (the limit is 400)")


def test_a_function_of_61_lines_is_named(tree: Path) -> None:
    (tree / "planning/planted.py").write_text("def long():\n" + "    x = 1\n" * 60)
    assert_broken(run_step("sizes", tree), "planning/planted.py:1 long: 61 lines (the limit is 60)")


def test_six_positional_parameters_are_named(tree: Path) -> None:
    (tree / "planning/planted.py").write_text("class A:\n    def wide(self, a, b, c, d, e, f): ...\n")
    assert_broken(run_step("sizes", tree), "planning/planted.py:2 wide: 6 positional parameters (the limit is 5)")


@pytest.mark.parametrize(
    ("docstring", "reason"),
    [
        ("Of a choice.", "3 words, at least 4"),
        ("Of the choices of a request.", "begins with 'Of'"),
        ("Likewise, of the other tokens.", "begins with 'Likewise'"),
        ("Return what nobody waits for.", "says 'nobody'"),
    ],
)
def test_a_docstring_that_cannot_be_read_alone_is_named(docstring: str, reason: str, tree: Path) -> None:
    (tree / "planning/planted.py").write_text(f'"""Plant a docstring for a test."""\n\nNUM = 1\n"""{docstring}"""\n')
    assert_broken(run_step("docstrings", tree), f"planning/planted.py:4 NUM: {reason}")


def test_sizes_at_the_limits_pass(tree: Path) -> None:
    function = "def full(a, b, c, d, e, *, f):\n" + "    x = 1\n" * 59
    (tree / "planning/planted.py").write_text(function + "x = 1\n" * 340)
    result = run_step("sizes", tree)
    assert result.returncode == 0, result.stdout


def assert_broken(result: subprocess.CompletedProcess[str], named: str) -> None:
    """The step failed, and its output names the place."""
    assert result.returncode == 1, result.stdout
    assert named in result.stdout, result.stdout
