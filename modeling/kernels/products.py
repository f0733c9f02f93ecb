"""The ways in which kernels in C++ multiply bf16 numbers, by name; sums are fp32 in every way."""

WIDENED = "widened"
"""Vectors, after both operands were widened to fp32."""
DOT = "dot"
"""Vectors, by the processor's dot product of bf16 pairs; linear layers do it everywhere, slowly where there is none."""
TILES = "tiles"
"""Matrices, by the processor's AMX."""
