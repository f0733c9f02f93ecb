"""Attention over a list of KV segments with the Triton kernel. Implements `baton.modeling.forward.attention.Kernel` for
GPUs.

The decoder uses it on a GPU if Triton is installed.

Shape letters: T query tokens, S keys, N heads, H head dim.
"""

from torch import Tensor

from baton.modeling.forward.attention import Partial, piece_by_piece
from baton.modeling.kernels.triton.prefill import Visibility, prefill_attention
from baton.modeling.kv.buffers import KvRows


@piece_by_piece
def triton_kernel(q_TNH: Tensor, rows: KvRows, causal: bool, mask_TS: Tensor | None) -> Partial:
    """Return the attention to one set of keys, computed with the Triton kernel. Keys and values are read in place.
    Raises ConfigError if Triton is not installed."""
    return prefill_attention(q_TNH, rows.k_SGH, rows.v_SGH, Visibility(is_causal=causal, mask_TS=mask_TS))
