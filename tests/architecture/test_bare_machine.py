"""What runs on a machine with a GPU and little else needs no more than that machine has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.test_packages import loaded_after
from tests.support.folders import ROOT

pytestmark = pytest.mark.integration

NOT_THERE = {"ray", "grpc", "deploy", "orchestrator", "google", "prometheus_client", "gguf", "pytest_asyncio"}
"""Packages that a bare machine may lack, and ours that need them."""
MOST_BYTES = 64 << 20
"""What may be carried to such a machine, at most."""
TESTS = sorted((ROOT / "tests/cuda").glob("*.py"))


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_tests_of_the_gpu_import_nothing_that_may_be_missing() -> None:
    modules = {module(path) for path in TESTS}
    loaded = loaded_after(*sorted(modules))  # their conftest.py first
    assert modules <= loaded
    assert {name.partition(".")[0] for name in loaded} & NOT_THERE == set()


def test_tests_of_the_gpu_find_their_fixtures_without_the_folder_above() -> None:
    bare = ["-c", "tests/cuda/bare.ini", "--rootdir=.", "--setup-plan", "-q", "tests/cuda"]
    environment = {**os.environ, "BATON_TEST_DEVICE": "emulated"}
    command = [sys.executable, "-m", "pytest", *bare]
    planned = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False)
    assert planned.returncode == 0, planned.stdout[-4000:]


def test_the_benchmark_of_the_gpu_imports_nothing_that_may_be_missing() -> None:
    loaded = loaded_after("benchmarks.cuda")
    assert {name.partition(".")[0] for name in loaded} & NOT_THERE <= {"deploy"}
    ours = {name for name in loaded if name.startswith("deploy.")}
    assert ours == {"deploy.config", "deploy.config.environment", "deploy.options", "deploy.options.subcommand"}


def test_the_repository_can_be_carried_there() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=True).stdout.split()
    assert sum((ROOT / name).stat().st_size for name in files) < MOST_BYTES
