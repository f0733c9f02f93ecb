"""Says whether a machine has what tests and benchmarks for GPUs need, or what became of them. cuda_measure.sh calls it.

`python tools/cuda_machine.py DEVICE` prints what is missing and returns 1, or prints the machine. With `NAME=STATUS`,
the exit statuses of what was run, it prints machine and statuses as one JSON object.
"""

import importlib.util
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

PYTHONS = ((3, 11), (3, 12))
LEAST_TORCH = (2, 11)
MODULES = (
    *("torch", "triton", "numpy", "pytest", "hypothesis", "safetensors", "xxhash", "tokenizers", "transformers"),
    *("jinja2", "sortedcontainers", "pydantic", "rich", "llguidance"),
)
_VERSIONS = ("torch", "triton", "numpy", "transformers", "grpcio")


def missing(device: str) -> list[str]:
    """Return what the machine lacks, one line each."""
    found = []
    if sys.version_info[:2] not in PYTHONS:
        found.append(f"Python {platform.python_version()}: use 3.11 or 3.12, by PYTHON=...")
    lacking = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if lacking:
        found.append(f"the packages {', '.join(lacking)}: carry their wheels and name the folder, by WHEELS=...")
    if "torch" in lacking:
        return found
    import torch

    number = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if number < LEAST_TORCH:
        found.append(f"torch {torch.__version__}: use 2.11 or newer")
    if device == "cuda" and not torch.cuda.is_available():
        found.append("a GPU that torch sees: see nvidia-smi, or use DEVICE=emulated")
    return found


def describe(device: str) -> dict[str, object]:
    """Return the machine's kind and the versions of what runs there."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    versions = {each: _version(each) for each in _VERSIONS if importlib.util.find_spec(each.removesuffix("io"))}
    return {"device": device, "name": name, "python": platform.python_version(), **versions}


def _version(package: str) -> str:
    """Return a package's version; where the module came by another name, as torch's own builds of Triton do, that it is
    unknown."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def main(device: str, *statuses: str) -> int:
    """Print what is missing, or the machine, or what became of runs; return the exit status."""
    if statuses:
        print(json.dumps(describe(device) | {name: int(status) for name, _, status in map(_parted, statuses)}))
        return 0
    lacks = missing(device)
    for line in lacks:
        print(f"cuda_measure: missing: {line}", file=sys.stderr)
    if not lacks:
        print(json.dumps(describe(device)))
    return 1 if lacks else 0


def _parted(status: str) -> tuple[str, str, str]:
    return status.partition("=")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
