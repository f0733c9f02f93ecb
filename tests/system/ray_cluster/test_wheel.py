"""Without a compiler, the distributed wheel serves with its native kernels, and a source tree can be installed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import pytest
from openai import OpenAI

from baton.modeling.kernels.instruction_sets import GENERIC, WHEEL_SETS, is_x86, usable_sets
from baton.modeling.kernels.native import FOLDERS
from tests.support.clusters.on_ray.ray_clusters import START_S, processes_of, recorded_folder, shared_files, until
from tests.support.folders import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(1800)]

COMPILERS = ("c++", "g++", "clang++", "cc", "gcc", "clang")
LIBRARIES = {
    f"baton/modeling/kernels/built/{folder}.{each.name}.so"
    for folder in FOLDERS
    for each in (WHEEL_SETS if is_x86() else (GENERIC,))
}
"""Kernels that a wheel holds."""
ONE_LINE = "there is no C++ compiler: Baton is installed without its kernels and uses torch's operators"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(ROOT / "tools" / "wheel.sh", folder, cwd=ROOT, environment={**os.environ, "PYTHON": sys.executable})
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a user with an empty home, in whose PATH there is no compiler."""
    home, commands = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("commands")
    for name in ("bash", "cat", "sh", "uname"):
        (commands / name).symlink_to(shutil.which(name) or name)
    of_pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    return {**of_pip, "HOME": str(home), "PATH": str(commands), "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="module")
def installed(wheel: Path, environment: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a fresh virtual environment with the wheel and the packages that it requires."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder, environment=environment)
    install = ("-m", "pip", "--python", folder / "bin" / "python", "install", "--no-compile", "--quiet")
    run(
        sys.executable, *install, "-c", ROOT / "constraints.txt", f"{wheel}[serve]", cwd=folder, environment=environment
    )
    return folder


def test_the_tag_is_what_auditwheel_confirms(wheel: Path) -> None:
    show = ("-m", "auditwheel", "show", "--json", wheel)
    shown = json.loads(run(sys.executable, *show, cwd=wheel.parent, environment=os.environ))
    assert "manylinux" in shown["overall_tag"]
    assert wheel.stem.split("-")[2:] == ["py3", "none", shown["overall_tag"]]
    assert not shown["external_libs"], "the kernels name no library that a Linux may lack, nor an OpenMP runtime"


def test_it_holds_the_kernels_of_each_set_and_every_file_of_its_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith("/")}
    packages = {name.partition("/")[0] for name in held}
    tracked = run("git", "ls-files", *packages, cwd=ROOT, environment=os.environ).split()
    left_out = ("deploy/manifests/*", "*.cpp", "*.h")
    assert held == LIBRARIES | {name for name in tracked if not any(fnmatch(name, each) for each in left_out)}


def test_it_serves_a_chat_with_native_kernels_where_there_is_no_compiler(
    installed: Path, environment: Mapping[str, str], smollm2: Path, tmp_path: Path
) -> None:
    environment = {**environment, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    environment["PATH"] = f"{installed / 'bin'}:{environment['PATH']}"
    assert not [name for name in COMPILERS if shutil.which(name, path=environment["PATH"])]
    settings = [f"model.name={smollm2}", "orchestrator.port=0", "http.port=0"]
    options = [part for each in settings for part in ("--set", each)]
    baton = installed / "bin" / "baton"
    best = next(each.name for each in usable_sets() if is_x86() or each is GENERIC)
    with serving([baton, "serve", *options], tmp_path, environment) as (process, url):
        ray_folder = recorded_folder(tmp_path)
        with OpenAI(base_url=url, api_key="any", max_retries=0, timeout=60) as client:
            (model,) = client.models.list()
            question = "What is the capital of Japan?"
            answer = client.chat.completions.create(
                model=model.id, messages=[{"role": "user", "content": question}], max_tokens=16, temperature=0
            )
        assert "Tokyo" in (answer.choices[0].message.content or "")
        packages = installed.glob("lib/python3*/site-packages")
        expected = {str(path / name) for path in packages for name in LIBRARIES if f".{best}." in name}
        assert kernels_loaded(ray_folder) == expected
        run(baton, "stop", cwd=tmp_path, environment=environment)
        assert process.wait(60) == 0
    assert not processes_of(ray_folder)
    assert not shared_files(tmp_path)


def test_a_source_tree_is_installed_without_a_compiler_and_says_so_once(
    environment: Mapping[str, str], tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for name in run("git", "ls-files", cwd=ROOT, environment=os.environ).split():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    install = ("-m", "pip", "install", "--verbose", "--no-deps", "--no-build-isolation", "--target", target)
    told = run(sys.executable, *install, source, cwd=tmp_path, environment=environment)
    assert [line.strip() for line in told.splitlines() if "compiler" in line] == [ONE_LINE]
    assert not list(target.rglob("*.so"))
    code = "from baton.modeling.kernels import native; print(native.__file__, native.load())"
    at_target = {**environment, "PYTHONPATH": str(target)}
    logged, shown = run(sys.executable, "-P", "-c", code, cwd=tmp_path, environment=at_target).splitlines()
    assert "torch's operators are used" in logged
    assert shown == f"{target / 'baton' / 'modeling' / 'kernels' / 'native.py'} False"


@contextmanager
def serving(
    command: list[str | Path], cache: Path, environment: Mapping[str, str]
) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Start a cluster; yield its process and the URL of its OpenAI-compatible API. Interrupt it at the end."""
    output = cache / "stderr.txt"
    with output.open("w") as stderr:
        process = subprocess.Popen(
            command, cwd=cache, env=environment, text=True, stderr=stderr, stdout=stderr, start_new_session=True
        )
    try:
        until(lambda: process.poll() is not None or "OpenAI's API over HTTP: " in output.read_text(), START_S)
        assert process.poll() is None, output.read_text()
        record = json.loads((cache / "baton" / "clusters" / "baton.json").read_text())
        yield process, f"{record['http']}/v1"
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(60)


def kernels_loaded(ray_folder: str) -> set[str]:
    """Return the paths of the kernel libraries that the workers of a Ray have loaded."""
    workers = [pid for pid, command in processes_of(ray_folder).items() if "WorkerActor" in command]
    assert workers
    lines = [line for pid in workers for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {line.split()[-1] for line in lines if "/kernels/built/" in line}


def run(program: str | Path, *arguments: str | Path, cwd: Path, environment: Mapping[str, str]) -> str:
    """Run a command that must succeed, and return its output."""
    done = subprocess.run(
        [program, *arguments], cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, f"{program} {' '.join(map(str, arguments))}: {done.stdout}"
    return done.stdout
