"""The rows of a generation step whose KV lies in pages: what decode attention and appending of KV are told of them.

B rows, T tokens of the step, E = B + 1, C pages of a row at most, P pages, S tokens of a page, G kv heads, H head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.kernels.triton.launch import DTYPES, check


@dataclass(frozen=True)
class StepRows:
    """Where the rows of a step have their new tokens and their keys. Holds tensors of the device, which a CUDA graph
    reads again at each replay: their owner may change their contents between steps, and never their shapes.

    Key number s of row b is token s % S of page `table_BC[b, s // S]`. A row's new tokens are its last keys. Contents
    are not checked, for that would wait for the device: they must be as the fields say. Raises RuntimeError for wrong
    shapes, dtypes or devices.
    """

    table_BC: Tensor
    """Numbers of each row's pages, int32. Entries beyond a row's length are not read."""
    lengths_B: Tensor
    """Keys of each row, new ones included, int32."""
    starts_E: Tensor
    """Number of each row's first new token among the step's, and behind the last row their sum, int32. A row that has
    no new tokens is padding: nothing is computed for it."""
    most_queries: int
    """Most new tokens of a row: an upper bound, known to the host."""
    most_keys: int
    """Most keys of a row: an upper bound, known to the host. Rows' results depend on it, and on no other row."""

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
        """Return the number of rows, padding included."""
        return len(self.lengths_B)

    def check_pages(self, pages_PS2GH: Tensor) -> None:
        """Check the pages of a layer. Raises RuntimeError for a wrong shape, dtype or device, or too few pages a
        row."""
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
        """Check what the step's tokens have, head by head, against the pages. Raises RuntimeError where it differs."""
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
