"""Code paths of the attention kernels in C++ that this processor can run: those for its own instruction set, and those
for smaller ones.

`make` builds the kernels for the processor's own instruction set. Kernels for other sets are built when a nightly test
requests them.
"""

import fcntl
import functools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.modeling.forward.decode_rows import has_native_rows
from baton.modeling.kernels import native
from baton.modeling.kernels.calls.operators import Operators
from baton.modeling.kernels.instruction_sets import SETS
from baton.modeling.kernels.process_kernels import KERNELS
from baton.modeling.kernels.products import DOT, TILES, WIDENED


@dataclass(frozen=True)
class KernelPath:
    """Instruction set and dtype of a kernel, and its method of multiplication."""

    instruction_set: str
    dtype: torch.dtype
    product: str

    def operators(self) -> Operators:
        """Return the operators of the kernels, which must be loaded."""
        return native.operators(self.instruction_set)

    def __str__(self) -> str:
        return f"{self.instruction_set}-{self.product}-{str(self.dtype).removeprefix('torch.')}"


INSTRUCTION_SETS = (native.NATIVE, *SETS)
"""The processor's own instruction set (under the name `native.NATIVE`), and all others for which kernels can be
built."""


def lane(instruction_set: str) -> tuple[pytest.MarkDecorator, ...]:
    """Return the pytest marks of a test that needs kernels for an instruction set."""
    return () if instruction_set == native.NATIVE else (pytest.mark.nightly,)


def sets() -> list[Any]:  # pytest's ParameterSet is not public
    """Return all instruction sets as parameters of a test."""
    return [pytest.param(each, marks=lane(each)) for each in INSTRUCTION_SETS]


PATHS = [
    KernelPath(native.NATIVE, torch.bfloat16, DOT),
    *(
        KernelPath(instruction_set, dtype, WIDENED)
        for instruction_set in INSTRUCTION_SETS
        for dtype in (torch.bfloat16, torch.float32)
    ),
]
TILED = KernelPath(native.NATIVE, torch.bfloat16, TILES)
"""Code path with tiled multiplication, available if `has_tiles()` is true."""
needs_rows = pytest.mark.skipif(
    not has_native_rows(torch.device("cpu"), torch.float32, 16), reason="needs a C++ compiler"
)


def require(instruction_set: str) -> None:
    """Load the kernels for an instruction set. Skips the test if the processor does not support it or no compiler is
    installed."""
    if native.lacking(instruction_set):
        pytest.skip(f"needs a processor with {instruction_set}")
    if shutil.which("c++") is None and not native.load(instruction_set):
        pytest.skip("needs a C++ compiler")
    if instruction_set != native.NATIVE:
        _build(instruction_set)
    assert native.load(instruction_set), f"kernels for {instruction_set} are not built: run `{native.BUILD}`"


@functools.cache
def _build(instruction_set: str) -> None:
    """Build kernels from the current sources. Waits if another process builds them at the same time."""
    root = Path(native.__file__).parents[3]
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    with (root / "setup.py").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(command, cwd=root, env={**os.environ, "BATON_KERNEL_SETS": instruction_set}, check=True)


def has_tiles() -> bool:
    """Return whether kernels can multiply in tiles on this machine."""
    return KERNELS.choice.attention == TILES
