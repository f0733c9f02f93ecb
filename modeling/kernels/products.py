"""How the kernels in C++ multiply bf16 numbers on this processor; sums are fp32 in every way.

Asked at the first call, which takes a millisecond, and the building of the probe where it was never built; the same for
the life of the process.
"""

import functools

from modeling.kernels import native

WIDENED = "widened"
"""Vectors, after both operands were widened to fp32."""
DOT = "dot"
"""Vectors, by the processor's dot product of bf16 pairs."""
TILES = "tiles"
"""Matrices, by the processor's AMX."""


@functools.cache
def best_product() -> str:
    """TILES where processor and operating system have them; of vectors DOT where that is faster than WIDENED: measured.
    WIDENED where there is no compiler to ask with."""
    if not native.load("products"):
        return WIDENED
    import torch

    operators = torch.ops.baton
    if operators.has_tiles():
        return TILES
    return WIDENED if operators.widens() else DOT
