"""Attention of queries to several segments of keys."""

from collections.abc import Iterable

from torch import Tensor

from baton.modeling.forward.attention import Attention, Kernel
from baton.modeling.kv.buffers import KvRows


def attend(
    q_TNH: Tensor, first_position: int, segments: Iterable[KvRows], window: int | None, kernel: Kernel
) -> Tensor:
    """Return the attention `[T, N, H]` of `q_TNH` to `segments`, in the queries' dtype. The queries have consecutive
    positions from `first_position`."""
    attention = Attention(q_TNH, first_position, window, kernel)
    attention.add(*segments)
    return attention.result()
