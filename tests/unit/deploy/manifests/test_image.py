"""The image: its Dockerfile passes hadolint, and the build gets all that the wheel is made of."""

import re
import subprocess
import tomllib

import pytest

from tests.support.folders import ROOT
from tests.support.manifests import MANIFESTS
from tests.support.tools import find_command

pytestmark = pytest.mark.integration

DOCKERFILE = MANIFESTS / "Dockerfile"


def test_the_dockerfile_passes_hadolint() -> None:
    hadolint = find_command("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    assert lint(hadolint, DOCKERFILE.read_text()) == ""
    assert "DL3042" in lint(hadolint, "FROM python:3.11-slim-bookworm\nRUN pip install baton==1.0\n")


def test_the_build_gets_every_package_of_the_wheel_and_little_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    include = project["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {name for name in include if not name.endswith(".*")}
    lines = (MANIFESTS / "Dockerfile.dockerignore").read_text().splitlines()
    given = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert lines[1] == "*"
    assert given == packages | {"pyproject.toml", "setup.py", "constraints.txt", "README.md", "LICENSE"}


def test_every_image_runs_as_a_user_and_all_have_the_same_python() -> None:
    text = DOCKERFILE.read_text()
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE)
    assert len({base for base, _ in stages if base.startswith("python:")}) == 1
    bodies = dict(zip([name for _, name in stages], re.split(r"^FROM .*$", text, flags=re.MULTILINE)[1:], strict=True))
    assert [name for name in ("cpu", "cuda") if "USER 10001:10001" not in bodies[name]] == []
    assert {name: base for base, name in stages}["cpu-baked"] == "cpu"


def lint(hadolint: str, text: str) -> str:
    """What hadolint says of a Dockerfile; empty when it passes."""
    ran = subprocess.run([hadolint, "--no-color", "-"], input=text, text=True, capture_output=True, timeout=60)
    return ran.stdout + ran.stderr
