"""tools/cuda_machine.py says what a machine lacks for a part before anything runs there."""

from importlib.metadata import packages_distributions
from pathlib import Path
from zipfile import ZipFile, ZipInfo

import pytest

from tests.architecture.test_packages import loaded_after
from tools import cuda_machine, cuda_wheels

pytestmark = pytest.mark.integration

EXECUTABLE, PLAIN = 0o755, 0o644
SERVER = ("ray", "deploy.cli", "deploy.commands.serve", "deploy.ray_cluster.ray_worker", "orchestrator.api.frontend")
"""Modules that import what a server on Ray imports."""
OPTIONAL = {"baton-serve", "colorama", "grpcio-tools", "jsonpointer", "psutil", "uvloop"}
"""What those import where it is installed, and do without; and ourselves."""


def ray_wheel(folder: Path, mode: int) -> Path:
    wheel = folder / "ray-2.60.0-py3-none-any.whl"
    with ZipFile(wheel, "w") as archive:
        for name in (cuda_machine.RAY_EXECUTABLE, "ray/jars/ray.jar"):
            entry = ZipInfo(name)
            entry.external_attr = mode << 16
            archive.writestr(entry, "program")
    return wheel


def lines(*parts: str, wheels: Path) -> list[str]:
    return cuda_machine.missing("emulated", parts, wheels)


def test_the_part_serve_needs_packages_that_the_others_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_machine, "_is_installed", lambda name: name not in ("ray", "google.rpc", "rpds"))
    assert lines("tests", "served", wheels=tmp_path) == []
    assert lines("tests", "serve", wheels=tmp_path) == [
        "for the part serve, the packages ray, google.rpc, rpds: gather wheels with tools/cuda_wheels.py"
    ]


def test_a_module_of_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_machine, "SERVER_MODULES", ("grpc", "google.absent", "absent.module"))
    assert lines("serve", wheels=tmp_path) == [
        "for the part serve, the packages google.absent, absent.module: gather wheels with tools/cuda_wheels.py"
    ]


def test_a_wheel_of_ray_stands_for_ray_if_its_files_are_executable(tmp_path: Path) -> None:
    wheel = ray_wheel(tmp_path, EXECUTABLE)
    assert lines("serve", wheels=tmp_path) == []
    ray_wheel(tmp_path, PLAIN)
    assert lines("serve", wheels=tmp_path) == [
        f"for the part serve, {wheel.name} with executable files: gather wheels with tools/cuda_wheels.py"
    ]


@pytest.mark.ci
def test_what_a_server_imports_is_asked_for() -> None:
    elsewhere = distributions(loaded_after(*cuda_machine.MODULES))
    asked = distributions({*cuda_machine.SERVER_MODULES, "ray"})
    assert distributions(loaded_after(*SERVER)) - elsewhere - asked <= OPTIONAL


def distributions(modules: set[str]) -> set[str]:
    """Names of what is installed for these modules."""
    found = packages_distributions()
    return {name for module in modules for name in found.get(module.partition(".")[0], ())}


def test_a_wheel_that_is_packed_again_stays_executable_and_lacks_what_is_left_out(tmp_path: Path) -> None:
    wheel = ray_wheel(tmp_path, EXECUTABLE)
    cuda_wheels.repack(wheel, ("ray/jars/",))
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]
    with ZipFile(wheel) as archive:
        assert archive.namelist() == [cuda_machine.RAY_EXECUTABLE]
        assert archive.read(cuda_machine.RAY_EXECUTABLE) == b"program"
    assert lines("serve", wheels=tmp_path) == []
