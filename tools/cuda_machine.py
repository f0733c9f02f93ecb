"""Checks that a machine has the software that GPU tests and benchmarks need, or reports the results of their runs. Used
by cuda_measure.sh.

`python tools/cuda_machine.py DEVICE WHEELS PART ...` prints the software that the machine lacks, and returns 1. If
nothing is missing, it prints a description of the machine. Each PART is a part of cuda_measure.sh that is to be run,
such as `tests` or `serve`. WHEELS is the folder of wheels that the part `serve` installs.

`python tools/cuda_machine.py DEVICE NAME=STATUS ...` prints a description of the machine and the exit statuses of the
named runs as one JSON object.
"""

import importlib.util
import json
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from zipfile import ZipFile

PYTHONS = ((3, 11), (3, 12))
LEAST_TORCH = (2, 11)
MODULES = (
    *("torch", "triton", "numpy", "pytest", "hypothesis", "safetensors", "xxhash", "tokenizers", "transformers"),
    *("jinja2", "sortedcontainers", "pydantic", "rich", "llguidance"),
)
SERVER_MODULES = (
    *("grpc", "grpc_health", "grpc_reflection", "google.protobuf", "google.rpc", "opentelemetry.sdk", "wrapt"),
    *("prometheus_client", "pythonjsonlogger", "fastapi", "uvicorn", "httptools", "gguf", "jsonschema", "referencing"),
    *(
        "jsonschema_specifications",
        "rpds",
        "attrs",
        "msgpack",
        "yaml",
        "filelock",
        "requests",
        "urllib3",
        "certifi",
        "idna",
    ),
    *("charset_normalizer", "click", "packaging", "annotated_types"),
)
"""Modules that `baton serve` and Ray import. The modules in MODULES, and Ray itself, are needed in addition."""
RAY_EXECUTABLE = "ray/core/src/ray/gcs/gcs_server"
"""Path, inside Ray's wheel, of a program that Ray starts. After installation, the program must be executable."""
_VERSIONS = ("torch", "triton", "numpy", "transformers", "grpcio")


def missing(device: str, parts: Sequence[str], wheels: Path) -> list[str]:
    """Return the software that the machine lacks, one line per item. `parts` are the parts of cuda_measure.sh that are
    to be run. `wheels` is the folder of the wheels that the part `serve` installs. The folder does not need to
    exist."""
    found = []
    if sys.version_info[:2] not in PYTHONS:
        found.append(f"Python {platform.python_version()}: use 3.11 or 3.12, by PYTHON=...")
    lacking = _absent(MODULES)
    if lacking:
        found.append(f"the packages {', '.join(lacking)}: carry their wheels and name the folder, by WHEELS=...")
    if "serve" in parts and (why := _no_server(wheels)):
        found.append(f"for the part serve, {why}: gather wheels with tools/cuda_wheels.py")
    if "torch" in lacking:
        return found
    import torch

    number = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if number < LEAST_TORCH:
        found.append(f"torch {torch.__version__}: use 2.11 or newer")
    if device == "cuda" and not torch.cuda.is_available():
        found.append("a GPU that torch sees: see nvidia-smi, or use DEVICE=emulated")
    return found


def _absent(modules: Sequence[str]) -> list[str]:
    return [name for name in modules if not _is_installed(name)]


def _is_installed(module: str) -> bool:
    """Return whether a module can be found. The parent package of a nested module is imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _no_server(wheels: Path) -> str:
    """Return what the machine lacks to run a server; empty if nothing is missing."""
    lacking = _absent(SERVER_MODULES)
    wheel = next(wheels.glob("ray-*.whl"), None)
    if wheel is None:
        lacking = [*_absent(["ray"]), *lacking]
    elif not _is_executable(wheel, RAY_EXECUTABLE):
        return f"{wheel.name} with executable files"
    return f"the packages {', '.join(lacking)}" if lacking else ""


def _is_executable(wheel: Path, name: str) -> bool:
    """Return whether a file of a wheel is executable after pip has installed the wheel."""
    with ZipFile(wheel) as archive:
        return bool(archive.getinfo(name).external_attr >> 16 & 0o111)


def describe(device: str) -> dict[str, object]:
    """Return the kind of the machine's device and the versions of Python and of the installed packages."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    versions = {each: _version(each) for each in _VERSIONS if importlib.util.find_spec(each.removesuffix("io"))}
    return {"device": device, "name": name, "python": platform.python_version(), **versions}


def _version(package: str) -> str:
    """Return a package's version. Return that it is unknown if the module was installed under another package name, as
    in torch's own builds of Triton."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def main(device: str, *rest: str) -> int:
    """Print a description of the machine and the results of runs, if all of `rest` have the form NAME=STATUS. Otherwise
    `rest` is the folder of wheels and the parts to run: print the missing software or, if nothing is missing, a
    description of the machine. Return the exit status."""
    if all("=" in each for each in rest):
        statuses = (each.partition("=") for each in rest)
        print(json.dumps(describe(device) | {name: int(status) for name, _, status in statuses}))
        return 0
    wheels, *parts = rest
    lacks = missing(device, parts, Path(wheels))
    for line in lacks:
        print(f"cuda_measure: missing: {line}", file=sys.stderr)
    if not lacks:
        print(json.dumps(describe(device)))
    return 1 if lacks else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
