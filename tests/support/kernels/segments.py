"""Attention of some queries to several segments of keys."""

from collections.abc import Iterable

from torch import Tensor

from baton.modeling.forward.attention import Attention, Kernel
from baton.modeling.kv.buffers import KvRows


def attend(
    q_TNH: Tensor, first_position: int, segments: Iterable[KvRows], window: int | None, kernel: Kernel
) -> Tensor:
    """Return the attention of `q_TNH`, at positions from `first_position`, to `segments`: `[T, N, H]`, in the queries'
    dtype."""
    attention = Attention(q_TNH, first_position, window, kernel)
    attention.add(*segments)
    return attention.result()
