"""Packed KV in 4 bits: group-wise asymmetric quantisation (FlexGen; Sheng et al., 2023, section 5).

The K vector, or V vector, of one token and head is divided into groups of 64 channels. A group has 16 levels at equal
distances. It stores its minimum and the step between two levels, both in fp16, and for each channel the number of the
nearest level. This takes 4.5 bits per element. FlexGen stores the reciprocal of the step. This module stores the step
itself, because it does not overflow for a narrow group, and because unpacking then needs no division.

A packed head begins with the level numbers, two per byte, the first channel's number in the high half. The step and the
minimum of each group follow. If the head dim is not a multiple of 64, groups have the largest even size below 64 that
divides the head dim. If a group contains an infinity, a NaN, or a value outside the range of fp16, all of its channels
are unpacked as NaN, so that the loss is visible.

C++ kernels pack and unpack (baton/modeling/kernels/sparse/kv_int4.cpp). With torch's own operations, which read the
memory about twelve times, unpacking took 20 times as long as attention in a step of 16 sequences of 4,096 tokens.

Shape suffixes: B sequences, T tokens, G kv heads, H head dim, W bytes of a packed head.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.errors import ConfigError
from baton.modeling.forward.selection import Picks
from baton.modeling.kernels import native
from baton.types import KvLayout

_MOST_CHANNELS = 64
_HEAD_DIM_STEP = 4
"""Each head dim must be a multiple of this number, so that a packed head is a whole number of fp16 elements."""


def has_int4_kernel() -> bool:
    """Return True if the C++ kernels that pack and unpack can be loaded."""
    return native.load()


@dataclass(frozen=True)
class Int4Format:
    """Packed 4-bit format of the heads of a KV layout. Raises ConfigError for heads that cannot be packed."""

    plain: KvLayout
    """Layout of KV that is not packed, in bfloat16 or float32."""

    def __post_init__(self) -> None:
        if self.plain.dtype == "float16":
            raise ConfigError("4 bits a channel hold KV of bfloat16 and float32, not float16: use another dtype")
        if self.plain.head_dim % _HEAD_DIM_STEP:
            remedy = f"not of {self.plain.head_dim} channels: use residency device"
            raise ConfigError(f"4 bits a channel hold heads of a multiple of {_HEAD_DIM_STEP}, {remedy}")

    @property
    def group(self) -> int:
        """Return the number of channels in a quantisation group."""
        return max(size for size in range(2, _MOST_CHANNELS + 1, 2) if self.plain.head_dim % size == 0)

    @property
    def head_bytes(self) -> int:
        """Return the number of bytes of one packed K vector, or V vector, of one head and token."""
        return self.plain.head_dim // 2 + 4 * (self.plain.head_dim // self.group)

    def packed(self, num_layers: int) -> KvLayout:
        """Return the layout for memory that stores the packed KV of `num_layers` layers. The layout's element type is
        fp16, but an element is only two bytes of packed data."""
        return replace(self.plain, num_layers=num_layers, head_dim=self.head_bytes // 2, dtype="float16")

    def pack(self, x_T2GH: Tensor, to_T2GW: Tensor) -> None:
        """Convert the keys and values `x_T2GH` of some tokens to 4 bits, and write the result to `to_T2GW`. Both
        tensors must be contiguous. Uses only the calling thread, with the GIL released."""
        self.pack_rows(*_addresses(x_T2GH, to_T2GW), torch.tensor([len(x_T2GH)]))

    def unpack(self, packed_T2GW: Tensor, to_T2GH: Tensor) -> None:
        """Convert the 4-bit keys and values `packed_T2GW` of some tokens to the dtype of `to_T2GH`, and write the
        result to `to_T2GH`. Both tensors must be contiguous. Uses all of torch's threads."""
        self.unpack_rows(*_addresses(packed_T2GW, to_T2GH), torch.tensor([len(to_T2GH)]))

    def pack_rows(self, from_B: Tensor, to_B: Tensor, num_tokens_B: Tensor) -> None:
        """Convert KV of several sequences to 4 bits. For each sequence, read the KV of `num_tokens_B` tokens at the
        address `from_B`, and write the result to the address `to_B`."""
        native.operators().pack_kv(from_B, to_B, self._num_heads(num_tokens_B), self._sizes())

    def unpack_rows(self, from_B: Tensor, to_B: Tensor, num_tokens_B: Tensor) -> None:
        """Convert 4-bit KV of several sequences to the layout's dtype. For each sequence, read the packed KV of the
        first `num_tokens_B` tokens at the address `from_B`, and write the result to the address `to_B`. Uses all of
        torch's threads."""
        native.operators().unpack_kv(from_B, to_B, self._num_heads(num_tokens_B), self._sizes())

    def unpack_picked(self, from_B: Tensor, to_B: Tensor, num_tokens_B: Tensor, picks: Picks) -> int:
        """Unpack the selected keys and values in `picks` from the addresses `from_B` to the addresses `to_B`, one
        address per sequence. A token's unpacked KV has the same token index as its packed KV. Other bytes at `to_B` do
        not change. Each kv head has its own picks. Picks that are not among the first `num_tokens_B` tokens of a
        sequence are ignored.

        Uses all of torch's threads. Return the number of unpacked keys. Raises RuntimeError if `picks` has a different
        number of sequences or heads, or a negative index.
        """
        lists, num_kv_heads = (picks.keys_BGK, picks.num_BG), picks.keys_BGK.shape[1]
        if num_kv_heads != self.plain.num_kv_heads:
            raise RuntimeError(f"picks are of {num_kv_heads} kv heads, rows of {self.plain.num_kv_heads}")
        return native.operators().unpack_picked_kv(from_B, to_B, num_tokens_B, lists, self._sizes())

    def _num_heads(self, num_tokens_B: Tensor) -> Tensor:
        return num_tokens_B * (2 * self.plain.num_kv_heads)

    def _sizes(self) -> tuple[int, int, bool]:
        return self.plain.head_dim, self.group, self.plain.dtype == "bfloat16"


def _addresses(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    assert source.is_contiguous() and target.is_contiguous()
    return torch.tensor([source.data_ptr()]), torch.tensor([target.data_ptr()])
