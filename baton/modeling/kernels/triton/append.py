"""Appends KV with Triton: writes the keys and values of new tokens to the pages of their sequences, in one launch.

Shape letters: T tokens of the step, U <= T tokens, P pages, S tokens of a page, G kv heads, H head dim.
"""

import torch
from torch import Tensor

from baton.modeling.kernels.triton.heads import Heads
from baton.modeling.kernels.triton.launch import check, launch, require_triton
from baton.modeling.kernels.triton.row_kernels import check_pages, check_tokens
from baton.modeling.kernels.triton.tiles import padded, power_of_two


def append_kv(k_TGH: Tensor, v_TGH: Tensor, pages_PS2GH: Tensor, slots_U: Tensor) -> None:
    """Write the keys and values of new tokens to the pages of their sequences. Does not wait for the device.

    `slots_U`: for each token, the index of its key among the tokens of all pages (page times S, plus the index in the
    page), int32. -1: the token's key is not written. The keys of tokens from U on are not written either. Contents are
    not checked. Raises RuntimeError for tensors that do not fit together, and ConfigError if Triton is not installed.
    """
    require_triton()
    from baton.modeling.kernels.triton import append_kernel as kernels

    check_pages(pages_PS2GH)
    check(k_TGH.shape == v_TGH.shape, f"keys {list(k_TGH.shape)} and values {list(v_TGH.shape)} must have one shape")
    check_tokens(k_TGH, pages_PS2GH)
    check_tokens(v_TGH, pages_PS2GH)
    page_tokens, _, num_kv_heads, head_dim = pages_PS2GH.shape[1:]
    check(k_TGH.shape[1] == num_kv_heads, f"{k_TGH.shape[1]} kv heads, and pages of {num_kv_heads}")
    check(slots_U.dtype == torch.int32 and slots_U.dim() == 1 and slots_U.is_contiguous(), "slots are int32, [U]")
    check(slots_U.device == k_TGH.device, "slots must be on the device of the keys")
    check(len(slots_U) <= len(k_TGH), f"{len(slots_U)} slots for the keys of {len(k_TGH)} tokens")
    if not len(slots_U):
        return
    k, v = (Heads(each, each.stride(0), each.stride(1)) for each in (k_TGH, v_TGH))
    places = kernels.Places(pages_PS2GH, pages_PS2GH.stride(0), slots_U)
    shape = kernels.AppendShape(num_kv_heads, power_of_two(num_kv_heads), head_dim, padded(head_dim), page_tokens)
    launch(k_TGH.device, kernels.append_token, (len(slots_U),), k, v, places, shape)
