"""Names of the methods with which the C++ kernels multiply bf16 numbers. All methods accumulate sums in fp32."""

WIDENED = "widened"
"""Method that uses vector instructions. It converts operands to fp32 before it multiplies them."""
DOT = "dot"
"""Method that uses the processor's vector instruction for dot products of bf16 pairs. On a processor without this
instruction, linear layers emulate it, which is slow."""
TILES = "tiles"
"""Method that multiplies matrices in the processor's AMX tiles."""
