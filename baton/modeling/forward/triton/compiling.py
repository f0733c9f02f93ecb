"""Compilation of a decoder's Triton kernels before its first request. Triton compiles a kernel when it is launched for
the first time with arguments of a new kind, such as another dtype. On a GPU, this takes about a second.
"""

import torch

from baton.modeling.forward.decoder import Decoder
from baton.modeling.kernels.triton.prefill import compile_prefills
from baton.modeling.kv.buffers import BufferSpan
from baton.types import TokenRange


@torch.inference_mode()
def compile_decoder(decoder: Decoder) -> None:
    """Compile the kernels with which a decoder computes prompts whose KV is in buffers: norms, gates, RoPE and
    attention. The decoder must have Triton kernels. The kernels for KV in pages are not compiled."""
    config = decoder.config
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    has_windows = any(window is not None for window in config.windows)
    compile_prefills(heads, decoder.dtype, decoder.weights.device, with_masks=has_windows)
    tokens = TokenRange(0, 1)
    span = BufferSpan(decoder.device.buffer(decoder.layout, tokens), tokens)
    decoder.logits(decoder.forward([0], [span]))
