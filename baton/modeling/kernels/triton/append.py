"""Appends KV with Triton: writes the keys and values of new tokens to the pages of their sequences, in one launch.

Shape letters: T tokens, P pages, S tokens of a page, G kv heads, H head dim.
"""

from torch import Tensor

from baton.modeling.kernels.triton.heads import Heads
from baton.modeling.kernels.triton.launch import check, on, require_triton
from baton.modeling.kernels.triton.row_kernels import StepRows
from baton.modeling.kernels.triton.tiles import padded, power_of_two


def append_kv(k_TGH: Tensor, v_TGH: Tensor, pages_PS2GH: Tensor, rows: StepRows) -> None:
    """Write the keys and values of new tokens to the pages of their sequences. Does not wait for the device.

    Sequences must not share the pages to which they write. Tokens that belong to no sequence are not written. Raises
    RuntimeError for tensors that do not fit together, and ConfigError if Triton is not installed.
    """
    require_triton()
    from baton.modeling.kernels.triton import append_kernel as kernels

    rows.check_pages(pages_PS2GH)
    check(k_TGH.shape == v_TGH.shape, f"keys {list(k_TGH.shape)} and values {list(v_TGH.shape)} must have one shape")
    rows.check_tokens(k_TGH, pages_PS2GH)
    rows.check_tokens(v_TGH, pages_PS2GH)
    page_tokens, _, num_kv_heads, head_dim = pages_PS2GH.shape[1:]
    check(k_TGH.shape[1] == num_kv_heads, f"{k_TGH.shape[1]} kv heads, and pages of {num_kv_heads}")
    if not len(k_TGH) or not rows.num_rows:
        return
    k, v = (Heads(each, each.stride(0), each.stride(1)) for each in (k_TGH, v_TGH))
    pages, table = (pages_PS2GH, pages_PS2GH.stride(0)), (rows.table_BC, rows.table_BC.stride(0))
    places = kernels.Places(*pages, *table, rows.lengths_B, rows.starts_E)
    shape = kernels.AppendShape(
        num_kv_heads, power_of_two(num_kv_heads), head_dim, padded(head_dim), page_tokens, rows.most_queries
    )
    with on(pages_PS2GH.device, kernels.append_token):
        kernels.append_token[(rows.num_rows * rows.most_queries,)](k, v, places, shape)
