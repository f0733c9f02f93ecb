"""Argument of kernels that describes heads of tokens in memory."""

from typing import Any, NamedTuple


class Heads(NamedTuple):
    """Heads of tokens in memory: base address, and the strides of tokens and heads in elements."""

    data: Any
    token_stride: int
    head_stride: int
