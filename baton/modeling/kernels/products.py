"""Names of the methods by which the C++ kernels multiply bf16 numbers. All of them sum in fp32."""

WIDENED = "widened"
"""Products of vectors whose operands are widened to fp32."""
DOT = "dot"
"""Products of vectors by the processor's dot product of bf16 pairs. Linear layers emulate it, slowly, on a processor
without it."""
TILES = "tiles"
"""Products of matrices by the processor's AMX."""
