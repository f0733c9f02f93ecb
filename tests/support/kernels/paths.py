"""The ways through the attention kernels in C++ that this processor can take: its own, and those of lesser ones.

Building a kernel takes its time: of the lesser ones, AVX2's are built by every run of the tests, the others in the soak
lane.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from modeling.kernels import native
from modeling.kernels.process_kernels import KERNELS
from modeling.kernels.products import DOT, TILES, WIDENED


@dataclass(frozen=True)
class KernelPath:
    """What a kernel is built for, and how it multiplies."""

    instruction_set: str
    dtype: torch.dtype
    product: str

    def operators(self) -> Any:  # torch.ops' namespaces have no type
        """Where the operators are, once they are loaded."""
        return getattr(torch.ops, native.namespace(self.instruction_set))

    def __str__(self) -> str:
        return f"{self.instruction_set}-{self.product}-{str(self.dtype).removeprefix('torch.')}"


_SOAK = ("avx512", "plain")


def lane(instruction_set: str) -> tuple[pytest.MarkDecorator, ...]:
    """The marks of a test that needs kernels built for it."""
    return (pytest.mark.nightly,) if instruction_set in _SOAK else ()


PATHS = [
    KernelPath(native.NATIVE, torch.bfloat16, DOT),
    *(
        KernelPath(instruction_set, dtype, WIDENED)
        for instruction_set in native.INSTRUCTION_SETS
        for dtype in (torch.bfloat16, torch.float32)
    ),
]
TILED = KernelPath(native.NATIVE, torch.bfloat16, TILES)
"""Where `has_tiles`."""


def require(name: str, instruction_set: str) -> None:
    """Loads a kernel; skips the test where there is no compiler or not that processor: elsewhere it has to build."""
    if native.find_compiler() is None or native.lacking(instruction_set):
        pytest.skip("needs a C++ compiler and a processor for it")
    assert native.load(name, instruction_set), f"kernel {name} cannot be built for {instruction_set}: see the log"


def has_tiles() -> bool:
    """Whether kernels can multiply in tiles here."""
    return KERNELS.choice.attention == TILES
