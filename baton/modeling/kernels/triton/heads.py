"""Argument of kernels that describes heads of tokens in memory."""

from typing import Any, NamedTuple


class Heads(NamedTuple):
    """Heads of tokens in memory: an address, and elements from one token or head to the next."""

    data: Any
    token_stride: int
    head_stride: int
