"""How the kernels in C++ multiply bf16 numbers on this processor; sums are fp32 either way."""

import functools

from modeling.kernels import native


@functools.cache
def widens() -> bool:
    """Whether bf16 operands are widened to fp32 before they are multiplied, because that is the faster way here, or the
    only one; else they go to the processor's bf16 dot product. Measured at the first call (a millisecond, and the
    building of the probe where it was never built); the same for the life of the process."""
    if not native.load("products"):
        return True
    import torch

    answer: bool = torch.ops.baton.widens()
    return answer
