"""Attention of the sequences of a generation step that have only few new tokens. Each new token is a row of the batch,
and one kernel call computes all rows.

`decoder` creates a DecodeRows object from spans. A span is a run of consecutive new tokens of one sequence. The rows
have different numbers of keys, in different memory, so a kernel gets B addresses and B lengths. The object computes the
addresses and lengths of all layers when it is created. The number of kernel calls per layer does not depend on the
number of rows. If a sequence has several new tokens, its keys are read only once.

Keys are contiguous, or in pages that a block table lists. Both give bitwise equal results. A row may attend to only
some keys: the location of its keys (KvPlace) may exclude keys, and a call may select keys. All other keys are not read.

DecodeRows needs the native kernel (baton/modeling/kernels/attention/decode_attention.cpp), which supports CPUs and some
dtypes. Without the kernel, the attention of each sequence is computed separately.

Shape letters: B rows, T tokens of the step, N heads, G kv heads, H head dim, L layers, C pages of a row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from baton.modeling.forward.attention import is_native
from baton.modeling.forward.selection import Picks
from baton.modeling.kernels import native
from baton.modeling.kernels.calls.checks import RowKeys
from baton.modeling.kernels.process_kernels import KERNELS
from baton.modeling.kv.buffers import KvPlace
from baton.types import TokenRange


class DecodeRows:
    """Attention of those spans of a step that have few new tokens. A span is a run of consecutive new tokens of one
    sequence. The object stores memory addresses, so it must not be used after the KV of these sequences is freed."""

    def __init__(self, spans: Sequence[tuple[int, KvPlace]], row_bytes: int, windows: Sequence[int | None]) -> None:
        """Collect the memory addresses of the spans (consecutive new tokens of one sequence).

        `spans`: for each span, the index of its first token among the tokens of the step, and the location of its keys.
        All spans must have memory for the same number of layers. Either all spans or none must store KV in pages.
        `row_bytes`: number of bytes of one token's K and V in one layer. `windows`: sliding window of each layer in
        tokens, or None. Windows are supported only for spans of one token.
        """
        tokens = [first + index for first, place in spans for index in range(place.num_new)]
        self.tokens_B = torch.tensor(tokens)
        self.in_order = tokens == list(range(len(tokens)))
        """True if the rows (new tokens) are the first tokens of the step, in the order of the step."""
        places = [place for _, place in spans]
        addresses_LB, lengths_LB, ends_LB = _lie(places, len(windows))
        pages_BC, page_tokens = _pages(places)
        queries_B = unseen_B2 = None
        if any(place.num_new > 1 for place in places):
            counts_S = torch.tensor([place.num_new for place in places])
            later_B = torch.tensor([back for place in places for back in reversed(range(place.num_new))])
            addresses_LB = addresses_LB.repeat_interleave(counts_S, 1)
            if pages_BC is not None:
                pages_BC = pages_BC.repeat_interleave(counts_S, 0)
            lengths_LB = ends_LB = lengths_LB.repeat_interleave(counts_S, 1) - later_B
            queries_B = counts_S.repeat_interleave(counts_S)
        if any(place.unseen is not None for place in places):
            left_out = [(place.num_new, place.unseen or TokenRange(0, 0)) for place in places]
            unseen_B2 = torch.tensor([(keys.start, keys.end) for num_new, keys in left_out for _ in range(num_new)])
        self._table = pages_BC, page_tokens
        has_one_length = all(place.others is None for place in places)
        self.keys = RowKeys(addresses_LB, lengths_LB[0], self._table, queries_B, unseen_B2) if has_one_length else None
        """Keys of all rows (new tokens) in all layers, for kernels that run all layers in one call. They include keys
        outside the sliding windows of layers. None if a row has different numbers of keys in different layers."""
        widest = int(lengths_LB.max())
        windows_L = torch.tensor([widest if window is None else window for window in windows])
        hidden_LB = (lengths_LB - windows_L.unsqueeze(1)).clamp(min=0)  # keys that a sliding window hides
        self._addresses = addresses_LB.unbind()
        self._lengths = lengths_LB.unbind()
        self._ends = ends_LB.unbind()
        first_LB, num_LB, unseen = addresses_LB, lengths_LB, [unseen_B2] * len(windows)
        if pages_BC is None:
            first_LB, num_LB = addresses_LB + hidden_LB * row_bytes, lengths_LB - hidden_LB
        else:
            unseen = [
                unseen_B2 if window is None else torch.stack((torch.zeros_like(hidden_B), hidden_B), 1)
                for window, hidden_B in zip(windows, hidden_LB, strict=True)
            ]
        self._seen = [
            RowKeys(first_B, num_B, self._table, queries_B, each)
            for first_B, num_B, each in zip(first_LB.unbind(), num_LB.unbind(), unseen, strict=True)
        ]

    def append(self, layer: int, k_TGH: Tensor, v_TGH: Tensor) -> None:
        """Write the keys and values of the rows (new tokens) to the KV memory of their sequences. `k_TGH` and `v_TGH`
        contain the keys and values of all tokens of the step."""
        k_BGH, v_BGH = self._of_rows(k_TGH), self._of_rows(v_TGH)
        native.operators().append_kv(k_BGH, v_BGH, self._addresses[layer], self._ends[layer], self._table)

    def attend(self, layer: int, q_TNH: Tensor, num_kv_heads: int, picks: Picks | None = None) -> Tensor:
        """Return the attention output of the rows (new tokens), `[B, N, H]`, in the dtype of the queries. `q_TNH`
        contains the queries of all tokens of the step.

        If `picks` is given, each row attends to exactly the selected keys. The selected keys must be within the
        layer's sliding window, because the window is not applied. Raises RuntimeError if a row would attend to a key
        that does not exist, or to no key.
        """
        keys, chosen = self._seen[layer], None
        if picks is not None:
            keys = RowKeys(self._addresses[layer], self._lengths[layer], self._table)
            chosen = picks.keys_BGK, picks.num_BG
        return native.operators().decode_attention(
            self._of_rows(q_TNH), keys, num_kv_heads, KERNELS.choice.attention, chosen
        )

    def _of_rows(self, x_TNH: Tensor) -> Tensor:
        is_all = self.in_order and len(x_TNH) == len(self.tokens_B)
        return x_TNH if is_all else x_TNH[self.tokens_B]


def has_native_rows(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return True if the C++ kernel of decode attention is available and supports KV of this dtype and head dim on this
    device."""
    fits = device.type == "cpu" and is_native(dtype, head_dim)
    return fits and native.load()


def _pages(places: Sequence[KvPlace]) -> tuple[Tensor | None, int]:
    """Return the addresses of the rows' pages in the first layer, `[B, C]`, and the number of tokens of a page. (None,
    0) for rows without pages."""
    tables = [place.table for place in places if place.table is not None]
    if not tables:
        return None, 0
    assert len(tables) == len(places), "all rows have pages, or none"
    data_LPS2GH, page_tokens = tables[0].data_LPS2GH, tables[0].page_tokens
    num_pages = -(-max(place.num_keys for place in places) // page_tokens)
    pages_BC = pad_sequence([table.pages_C[:num_pages] for table in tables], batch_first=True).to(torch.int64)
    page_bytes = data_LPS2GH.stride(1) * data_LPS2GH.element_size()
    return pages_BC * page_bytes + data_LPS2GH.data_ptr(), page_tokens


def _lie(places: Sequence[KvPlace], num_layers: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the addresses, the numbers of keys, and the ends (exclusive) of the new keys' indices, each `[L, B]`."""
    (num_here,) = {place.num_layers for place in places}
    others = [place.others for place in places if place.others is not None]
    layers = torch.arange(num_here if others else num_layers)
    addresses_B = torch.tensor([place.address for place in places])
    layer_bytes_B = torch.tensor([place.layer_bytes for place in places])
    addresses_LB = addresses_B + layer_bytes_B * (layers % num_here).unsqueeze(1)
    lengths_LB = torch.tensor([place.num_keys for place in places]).repeat(len(layers), 1)
    ends = [place.num_keys if place.own is None else place.own + 1 for place in places]
    here = addresses_LB, lengths_LB, torch.tensor(ends).repeat(len(layers), 1)
    if not others:
        return here
    assert len(others) == len(places), "all rows have memory for the same layers"
    first, second, third = map(torch.cat, zip(here, _lie(others, num_layers - num_here), strict=True))
    return first, second, third
