"""Kernel arguments that describe the sequences of a generation step, whose KV is in pages. Used by decode attention and
by appending of KV.

Shape letters: B sequences, T tokens of the step, E = B + 1, at most C pages of a sequence, P pages, S tokens of a page,
G kv heads, H head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.modeling.kernels.triton.launch import DTYPES, check


@dataclass(frozen=True)
class StepRows:
    """New tokens and keys of the sequences of a step. The tensors are on the device, and a CUDA graph reads them again
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
    """Index of each sequence's first new token among the tokens of the step, int32. The last entry is the total number
    of new tokens. A sequence without new tokens is padding: nothing is computed for it."""
    most_queries: int
    """Upper bound on the number of new tokens of a sequence, known to the host."""
    most_keys: int
    """Upper bound on the number of keys of a sequence, known to the host. The results of a sequence may be rounded
    differently if this bound differs. The other sequences of the step do not affect the rounding."""

    def __post_init__(self) -> None:
        tensors = self.table_BC, self.lengths_B, self.starts_E
        check(all(each.dtype == torch.int32 for each in tensors), "table, lengths and starts must be int32")
        check(len({each.device for each in tensors}) == 1, "table, lengths and starts must be on one device")
        num_rows = len(self.lengths_B)
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

    def check_pages(self, pages_PS2GH: Tensor) -> None:
        """Check the pages of a layer. Raises RuntimeError if their shape, dtype or device is wrong, or if the block
        tables have fewer pages than `most_keys` keys need."""
        check(
            pages_PS2GH.dim() == 5 and pages_PS2GH.shape[2] == 2 and pages_PS2GH.numel() > 0,
            f"pages must be [pages, tokens, 2, kv heads, head dim], not {list(pages_PS2GH.shape)}",
        )
        check(pages_PS2GH[0].is_contiguous(), "each page must be contiguous")
        check(pages_PS2GH.dtype in DTYPES, f"pages are {pages_PS2GH.dtype}: use bfloat16, float16 or float32")
        check(pages_PS2GH.device == self.lengths_B.device, "pages must be on the device of the table")
        room = self.table_BC.shape[1] * pages_PS2GH.shape[1]
        check(self.most_keys <= room, f"most_keys = {self.most_keys}, and the table has room for {room} keys a row")

    def check_tokens(self, tokens_TXH: Tensor, pages_PS2GH: Tensor) -> None:
        """Check that queries, keys or values of the step's tokens fit the pages. Raises RuntimeError if head dim, dtype
        or device differ."""
        check(
            tokens_TXH.dim() == 3, f"queries, keys and values are [tokens, heads, head dim], not {tokens_TXH.dim()}-d"
        )
        head_dim = pages_PS2GH.shape[4]
        check(tokens_TXH.shape[2] == head_dim, f"head dim is {tokens_TXH.shape[2]}, that of the pages {head_dim}")
        check(tokens_TXH.stride(2) == 1, "each head must be contiguous")
        check(
            tokens_TXH.dtype == pages_PS2GH.dtype, f"dtype is {tokens_TXH.dtype}, that of the pages {pages_PS2GH.dtype}"
        )
        check(tokens_TXH.device == pages_PS2GH.device, "tokens must be on the device of the pages")
