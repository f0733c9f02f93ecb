"""Attention over a list of KV segments by our kernel in Triton: a `modeling.forward.attention.Kernel` for GPUs.

The decoder takes it where there is a GPU and Triton. T query tokens, S keys, N heads, H head dim.
"""

from torch import Tensor

from modeling.forward.attention import Partial, piece_by_piece
from modeling.kernels.triton.prefill import Visibility, prefill_attention
from modeling.kv.buffers import KvRows


@piece_by_piece
def triton_kernel(q_TNH: Tensor, rows: KvRows, causal: bool, mask_TS: Tensor | None) -> Partial:
    """Attend by the kernel in Triton, which reads keys and values as they lie. Raises ConfigError without Triton."""
    return prefill_attention(q_TNH, rows.k_SGH, rows.v_SGH, Visibility(is_causal=causal, mask_TS=mask_TS))
