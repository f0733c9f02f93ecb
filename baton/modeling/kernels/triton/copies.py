"""Copies between pinned host memory and a GPU's memory with Triton kernels, which access host memory directly.

A GPU can access pinned host memory at the host's own addresses. A copy may therefore depend on values that only the
device knows, such as the selected keys that are missing on the device.

Shape letters: B sequences, G kv heads, at most K pairs.
"""

import torch
from torch import Tensor

from baton.modeling.kernels.triton.launch import check, launch, require_triton
from baton.modeling.kernels.triton.tiles import power_of_two

_TILE_WORDS = 4096
"""Maximum number of words of keys that one program copies. It copies the same number of words of values."""


def copy_heads(from_B: Tensor, to_B: Tensor, pairs_BGK2: Tensor, num_BG: Tensor, head_bytes: int) -> None:
    """Copy single keys and values of kv heads. Does not wait for the device.

    `from_B`, `to_B`: source and target address of each sequence's KV `[tokens, 2, G, head]`, int64. The tensors' device
    must be able to access these addresses. `pairs_BGK2`: for each kv head, pairs of a token's index at the source and
    its index at the target, int32. `num_BG`: number of pairs of each kv head, int32. `head_bytes`: number of bytes of
    one key of a head.

    The contents of the tensors are not checked. Raises RuntimeError for tensors that do not fit together, and
    ConfigError if Triton is not installed.
    """
    require_triton()
    from baton.modeling.kernels.triton import copy_kernels as kernels

    num_rows, num_kv_heads, most_pairs = pairs_BGK2.shape[:3]
    check(pairs_BGK2.shape[3:] == (2,) and num_BG.shape == (num_rows, num_kv_heads), "a kv head has a list of pairs")
    check(all(each.dtype == torch.int32 and each.is_contiguous() for each in (pairs_BGK2, num_BG)), "pairs are int32")
    _check_addresses(num_rows, from_B, to_B)
    if not pairs_BGK2.numel():
        return
    word_bytes = _word_bytes(head_bytes)
    head_words = head_bytes // word_bytes
    head_pad = power_of_two(head_words)
    tile_pairs = max(_TILE_WORDS // head_pad, 1)
    shape = kernels.HeadShape(num_kv_heads, head_words, head_pad, tile_pairs, word_bytes)
    grid, lists = (num_rows * num_kv_heads, -(-most_pairs // tile_pairs)), kernels.Pairs(pairs_BGK2, num_BG)
    launch(pairs_BGK2.device, kernels.copy_pairs, grid, from_B, to_B, lists, most_pairs, shape)


def copy_rows(from_B: Tensor, to_B: Tensor, num_bytes: int) -> None:
    """Copy `num_bytes` bytes for each sequence, from its address in `from_B` to its address in `to_B`. Both are int64
    tensors. Does not wait for the device. Raises RuntimeError for tensors that do not fit together, and ConfigError if
    Triton is not installed."""
    require_triton()
    from baton.modeling.kernels.triton import copy_kernels as kernels

    _check_addresses(len(from_B), from_B, to_B)
    if not len(from_B):
        return
    word_bytes = _word_bytes(num_bytes)
    num_words = num_bytes // word_bytes
    tile_words = min(power_of_two(num_words), _TILE_WORDS)
    grid = (len(from_B), -(-num_words // tile_words))
    launch(from_B.device, kernels.copy_words, grid, from_B, to_B, num_words, tile_words, word_bytes)


def _word_bytes(num_bytes: int) -> int:
    return 4 if num_bytes % 4 == 0 else 2


def _check_addresses(num_rows: int, *addresses: Tensor) -> None:
    for each in addresses:
        check(each.dtype == torch.int64 and each.shape == (num_rows,) and each.is_contiguous(), "addresses are int64")
