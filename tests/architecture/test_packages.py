"""The lists of packages in pyproject.toml are complete, and importing a package brings in no more than it should."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from setuptools import find_packages

from tests.support.folders import ROOT

pytestmark = pytest.mark.integration

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = sorted(path.parent.name for path in ROOT.glob("[!.]*/__init__.py"))


def test_every_package_is_checked_for_its_layer() -> None:
    assert sorted(PROJECT["tool"]["importlinter"]["root_packages"]) == PACKAGES


def test_every_package_has_a_layer() -> None:
    contract = next(c for c in PROJECT["tool"]["importlinter"]["contracts"] if c["id"] == "layers")
    layers = {name.strip(" ()") for layer in contract["layers"] for name in layer.split("|")}
    assert set(PACKAGES) <= layers


def test_every_package_is_checked_for_circles() -> None:
    contract = next(c for c in PROJECT["tool"]["importlinter"]["contracts"] if c["id"] == "circles")
    assert sorted(contract["ancestors"]) == PACKAGES


def test_every_package_is_type_checked() -> None:
    assert set(PACKAGES) <= set(PROJECT["tool"]["mypy"]["files"])


def test_the_wheel_holds_every_package_but_benchmarks() -> None:
    include = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    found = find_packages(where=str(ROOT), include=include)
    assert sorted({name.partition(".")[0] for name in found}) == [p for p in PACKAGES if p != "benchmarks"]
    assert "baton.v1" in found


@pytest.mark.parametrize("package", [package for package in PACKAGES if package != "benchmarks"])
def test_a_package_in_the_wheel_is_marked_as_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


def test_no_test_folder_is_a_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_importing_all_of_a_package_leaves_torch_out() -> None:
    modules = sorted(
        str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
        for package in ("baton", "orchestrator", "gateway")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py" and ROOT / "baton" / "modeling" not in path.parents
    )
    loaded = loaded_after(*modules)
    assert set(modules) <= loaded
    assert not {"torch", "ray"} & loaded


def test_what_starts_a_cluster_leaves_torch_and_transformers_to_its_workers() -> None:
    modules = ("deploy.commands.serve", "deploy.ray_cluster.supervisor", "deploy.ray_cluster.ray_worker")
    assert not {"torch", "transformers", "baton_lab"} & loaded_after(*modules)


def test_commands_are_listed_without_the_packages_of_extras() -> None:
    assert not {"grpc", "numpy", "pydantic", "ray", "rich", "torch", "transformers"} & loaded_after("deploy.cli")


def test_what_serves_leaves_the_laboratory_out() -> None:
    modules = ("gateway.app", "orchestrator.api.host", "prefill_workers.servicer", "generate_workers.servicer")
    assert "baton_lab" not in loaded_after(*modules)


def test_commands_that_ask_a_server_elsewhere_leave_torch_out() -> None:
    modules = [
        f"{folder.replace('/', '.')}.{path.stem}"
        for folder in ("baton_lab/bench", "deploy/top")
        for path in sorted((ROOT / folder).glob("[!_]*.py"))
    ]
    loaded = loaded_after(*modules, "deploy.commands.record", "deploy.config.file")
    assert set(modules) <= loaded
    assert not {"torch", "ray", "transformers"} & loaded


def test_the_probe_sees_torch_where_it_is_imported() -> None:
    assert "torch" in loaded_after("baton.modeling.kv.buffers")


def loaded_after(*modules: str) -> set[str]:
    """sys.modules of a fresh interpreter that imported `modules`."""
    program = f"import sys, {', '.join(modules)}; print('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True, check=True)
    return set(run.stdout.split())


MOST_ENTRIES = 20


def test_a_folder_can_be_taken_in_at_a_glance() -> None:
    counts: dict[Path, set[str]] = {}
    for name in subprocess.run(
        ["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=True
    ).stdout.split():
        path = Path(name)
        for folder, entry in zip(path.parents, path.parts[::-1], strict=False):
            counts.setdefault(folder, set()).add(entry)
    crowded = {
        str(folder): len(entries)
        for folder, entries in counts.items()
        if len(entries) > MOST_ENTRIES and not is_excepted(folder)
    }
    assert crowded == {}


def is_excepted(folder: Path) -> bool:
    """The root, generated stubs, decisions, tests of units, a suite of others, and the commands of benchmarks, with a
    file of results for each."""
    excepted = (".", "baton/v1", "docs/decisions", "benchmarks", "tests/data/json_schema_suite")
    has_one_for_each = folder.is_relative_to("tests/unit") or folder.is_relative_to("benchmarks/results")
    return str(folder) in excepted or has_one_for_each
