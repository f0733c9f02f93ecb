"""Kernel arguments that describe the sequences of a generation step, whose KV is in pages. Used by decode attention and
by prefill attention over pages.

Shape letters: B sequences, T tokens of the step, E = B + 1, at most C pages of a sequence, P pages, S tokens of a page,
G kv heads, H head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.modeling.kernels.triton.launch import DTYPES, check


@dataclass(frozen=True)
class StepRows:
    """New tokens and keys of some sequences of a step. The tensors are on the device, and a CUDA graph reads them again
    at each replay. Their contents may change between steps, but not their shapes.

    Key s of sequence b is token s % S of page `table_BC[b, s // S]`, where S is the number of tokens of a page. The new
    tokens of a sequence are its last keys. Contents are not checked, because a check would wait for the device. Raises
    RuntimeError for wrong shapes, dtypes or devices.
    """

    table_BC: Tensor
    """Block table of each sequence: the indices of its pages, int32. Entries beyond the length of a sequence are not
    read."""
    lengths_B: Tensor
    """Number of keys of each sequence, including the keys of new tokens, int32."""
    starts_E: Tensor
    """Number of new tokens of the sequences before each sequence, int32. The last entry is the total number of new
    tokens. A sequence without new tokens is padding: nothing is computed for it."""
    most_queries: int
    """Upper bound on the number of new tokens of a sequence, known to the host."""
    most_keys: int
    """Upper bound on the number of keys of a sequence of this step, known to the host. It does not affect results."""
    firsts_B: Tensor | None = None
    """Index of each sequence's first new token among the tokens of the step, int32. None: the step has only the new
    tokens of these sequences, in their order."""
    capacity_keys: int | None = None
    """Upper bound on the number of keys of a sequence in all steps. Block sizes depend on it. Results for different
    values may be rounded differently. None: `most_keys`."""
    num_tokens: int | None = None
    """Upper bound on the total number of new tokens. None: `most_queries` tokens for each sequence."""

    def __post_init__(self) -> None:
        tensors = [self.table_BC, self.lengths_B, self.starts_E]
        num_rows = len(self.lengths_B)
        if self.firsts_B is not None:
            tensors.append(self.firsts_B)
            check(self.firsts_B.shape == (num_rows,) and self.firsts_B.is_contiguous(), f"firsts must be [{num_rows}]")
        check(all(each.dtype == torch.int32 for each in tensors), "table, lengths and starts must be int32")
        check(len({each.device for each in tensors}) == 1, "table, lengths and starts must be on one device")
        check(self.table_BC.dim() == 2 and len(self.table_BC) == num_rows, f"table must be [{num_rows}, pages]")
        check(self.table_BC.stride(1) == 1 or self.table_BC.shape[1] == 1, "a row of the table must be contiguous")
        check(self.lengths_B.dim() == 1 and self.lengths_B.is_contiguous(), "lengths must be [B], contiguous")
        is_flat = self.starts_E.shape == (num_rows + 1,) and self.starts_E.is_contiguous()
        check(is_flat, f"starts must be [{num_rows + 1}], contiguous: a start for each row, and the end")
        check(self.most_queries > 0, f"most_queries = {self.most_queries}: use 1 or more")
        check(self.most_keys > 0, f"most_keys = {self.most_keys}: use 1 or more")

    @property
    def num_rows(self) -> int:
        """Return the number of sequences, including padding."""
        return len(self.lengths_B)

    @property
    def capacity(self) -> int:
        """Return the upper bound on the number of keys of a sequence in all steps."""
        return self.most_keys if self.capacity_keys is None else max(self.capacity_keys, self.most_keys)

    def check(self, q_TNH: Tensor, pages_PS2GH: Tensor) -> None:
        """Check the queries of the step's tokens and the pages of a layer. Raises RuntimeError if shapes, dtypes or
        devices do not fit together, or if the block tables have fewer pages than `most_keys` keys need."""
        check_pages(pages_PS2GH)
        check(pages_PS2GH.device == self.lengths_B.device, "pages must be on the device of the table")
        room = self.table_BC.shape[1] * pages_PS2GH.shape[1]
        check(self.most_keys <= room, f"most_keys = {self.most_keys}, and the table has room for {room} keys a row")
        check_tokens(q_TNH, pages_PS2GH)
        num_heads, num_kv_heads = q_TNH.shape[1], pages_PS2GH.shape[3]
        shares = num_heads > 0 and num_heads % num_kv_heads == 0
        check(shares, f"{num_heads} heads do not share {num_kv_heads} kv heads")


def check_pages(pages_PS2GH: Tensor) -> None:
    """Check the pages of a layer. Raises RuntimeError if their shape or dtype is wrong."""
    check(
        pages_PS2GH.dim() == 5 and pages_PS2GH.shape[2] == 2 and pages_PS2GH.numel() > 0,
        f"pages must be [pages, tokens, 2, kv heads, head dim], not {list(pages_PS2GH.shape)}",
    )
    check(pages_PS2GH[0].is_contiguous(), "each page must be contiguous")
    check(pages_PS2GH.dtype in DTYPES, f"pages are {pages_PS2GH.dtype}: use bfloat16, float16 or float32")


def check_tokens(tokens_TXH: Tensor, pages_PS2GH: Tensor) -> None:
    """Check that queries, keys or values of the step's tokens fit the pages. Raises RuntimeError if head dim, dtype or
    device differ."""
    check(tokens_TXH.dim() == 3, f"queries, keys and values are [tokens, heads, head dim], not {tokens_TXH.dim()}-d")
    head_dim = pages_PS2GH.shape[4]
    check(tokens_TXH.shape[2] == head_dim, f"head dim is {tokens_TXH.shape[2]}, that of the pages {head_dim}")
    check(tokens_TXH.stride(2) == 1, "each head must be contiguous")
    check(tokens_TXH.dtype == pages_PS2GH.dtype, f"dtype is {tokens_TXH.dtype}, that of the pages {pages_PS2GH.dtype}")
    check(tokens_TXH.device == pages_PS2GH.device, "tokens must be on the device of the pages")
