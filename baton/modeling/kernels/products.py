"""Names of the methods with which the C++ kernels multiply bf16 numbers. All methods accumulate sums in fp32."""

WIDENED = "widened"
"""Vector method: operands are converted to fp32 before they are multiplied."""
DOT = "dot"
"""Vector method: uses the processor's instruction for dot products of bf16 pairs. On a processor without it, linear
layers emulate the instruction, which is slow."""
TILES = "tiles"
"""Matrix method: uses the processor's AMX tiles."""
