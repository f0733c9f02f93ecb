"""Kernel argument that describes the heads of tokens in memory."""

from typing import Any, NamedTuple


class Heads(NamedTuple):
    """Kernel argument that describes the heads of tokens in memory: base address, and strides of tokens and heads in
    elements."""

    data: Any
    token_stride: int
    head_stride: int
