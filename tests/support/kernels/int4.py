"""KV in 4 bits for tests: random KV to quantise, its expected values after dequantisation, and the processors for which
the kernel is built."""

import torch
from torch import Tensor

from baton.types import KvLayout
from generate_workers.residency.int4.format import Int4Format

HEAD_DIMS = (4, 12, 16, 40, 64, 80, 96, 128, 256)


def form_of(head_dim: int, dtype: str = "float32", num_kv_heads: int = 1) -> Int4Format:
    return Int4Format(KvLayout("test", 1, num_kv_heads, head_dim, dtype))


def packed(form: Int4Format, x_T2GH: Tensor) -> Tensor:
    to_T2GW = torch.full((*x_T2GH.shape[:3], form.head_bytes), 0xEE, dtype=torch.uint8)
    form.pack(x_T2GH, to_T2GW)
    return to_T2GW


def there_and_back(form: Int4Format, x_T2GH: Tensor) -> Tensor:
    back_T2GH = torch.empty_like(x_T2GH)
    form.unpack(packed(form, x_T2GH), back_T2GH)
    return back_T2GH


def random_kv(form: Int4Format, num_tokens: int, seed: int = 0) -> Tensor:
    """Return random KV heads whose ranges of values have very different widths and are not centred at 0."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, 2, form.plain.num_kv_heads, form.plain.head_dim)
    widths = torch.randn(*shape[:3], 1, generator=generator).mul_(2).exp_()  # all values are in fp16's range
    values = torch.randn(shape, generator=generator) * widths + torch.randn(shape[:3], generator=generator)[..., None]
    return values.to(getattr(torch, form.plain.dtype))
