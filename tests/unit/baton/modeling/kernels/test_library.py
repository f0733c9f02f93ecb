"""Kernels in C++ get the arguments that their sources declare, and share torch's threads."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from baton.modeling.kernels import native
from baton.modeling.kernels.calls import library
from tests.support.kernels.paths import require

pytestmark = pytest.mark.integration

CALLS = Path(library.__file__).parent
LETTERS = {"int64_t": "n", "int": "t", "double": "d", "bool": "b"}
"""Letters of types that are no pointers."""


def letter(parameter: str) -> str:
    """The letter of a parameter as a source declares it."""
    if "char* product" in parameter or "char* linears" in parameter or "char* scores" in parameter:
        return "s"
    return "p" if "*" in parameter else LETTERS[parameter.split()[0]]


def test_arguments_are_those_that_the_sources_declare() -> None:
    declared: dict[str, str] = {}
    for source in CALLS.parent.glob("*/*.cpp"):
        for name, parameters in re.findall(
            r"^BATON_ENTRY const char\* baton_(\w+)\(([^)]*)\)", source.read_text(), re.MULTILINE
        ):
            declared[name] = "".join(letter(" ".join(each.split())) for each in parameters.split(","))
    called: dict[str, str] = {}
    for module in ("operators.py", "sparse_operators.py"):
        called |= dict(re.findall(r'\.function\("(\w+)", "(\w+)"\)', (CALLS / module).read_text()))
    assert called == declared
    assert called, "no kernel was found"


def test_kernels_run_on_the_openmp_runtime_of_torch() -> None:
    require(native.NATIVE)
    code = (
        "import torch; from baton.modeling.kernels import native; torch.set_num_threads(2);"
        "native.operators().largest_tokens(torch.zeros(2, 9)); torch.zeros(10**6).exp();"
        "maps = {line.split()[-1] for line in open('/proc/self/maps')};"
        "print(sum('omp' in path.rsplit('/', 1)[-1] for path in maps))"
    )
    run = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=100, check=True)
    assert run.stdout.strip() == "1"
