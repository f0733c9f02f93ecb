"""Kernel arguments that describe heads of tokens and pages of KV in memory."""

from typing import Any, NamedTuple


class Heads(NamedTuple):
    """Kernel argument that describes the heads of tokens in memory: base address, and strides of tokens and heads in
    elements."""

    data: Any
    token_stride: int
    head_stride: int


class Pages(NamedTuple):
    """Kernel argument: address of the pages of keys and values, and stride of a page in elements."""

    data: Any
    page_stride: int


class Inputs(NamedTuple):
    """Kernel argument of attention over pages: the queries of a step's tokens, and the pages of a layer."""

    q: Heads
    pages: Pages
