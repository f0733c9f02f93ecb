"""Instruction sets for which kernels are built: the compiler flags, and the features that a processor must have.

setup.py builds kernels for these sets, and `native` selects one of them. Imports only the standard library.
"""

import platform
from dataclasses import dataclass

from baton.modeling.kernels.processor import cpu_flags

_V3 = frozenset("avx2 bmi1 bmi2 f16c fma abm movbe".split())
_V4 = _V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())


@dataclass(frozen=True)
class InstructionSet:
    """Set of instructions that a library of kernels may use."""

    name: str
    flags: tuple[str, ...]
    """Compiler flags, for GCC and Clang."""
    features: frozenset[str]
    """Features that the processor must have, named as in /proc/cpuinfo."""


_BF16 = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
_V4_BF16 = _V4 | {"avx512_bf16", "avx512_vnni"}
WHEEL_SETS = (
    InstructionSet("x86-64-v4-amx", (*_BF16, "-mamx-tile", "-mamx-bf16"), _V4_BF16 | {"amx_tile", "amx_bf16"}),
    InstructionSet("x86-64-v4-bf16", _BF16, _V4_BF16),
    InstructionSet("x86-64-v4", ("-march=x86-64-v4",), _V4),
    InstructionSet("x86-64-v3", ("-march=x86-64-v3",), _V3),
)
"""Instruction sets for which a wheel contains kernels. The best one is first."""
GENERIC = InstructionSet("generic", (), frozenset())
"""Instruction set that a compiler uses without flags: SSE2 or NEON."""
SETS = {each.name: each for each in (*WHEEL_SETS, GENERIC)}
"""All instruction sets by name. The best one is first."""


def usable_sets() -> tuple[InstructionSet, ...]:
    """Return the instruction sets that this processor supports. The best one is first."""
    has = set(cpu_flags())
    return tuple(each for each in SETS.values() if each is GENERIC or (is_x86() and each.features <= has))


def is_x86() -> bool:
    """Return True if this is an x86-64 processor."""
    return platform.machine() in ("x86_64", "AMD64")
