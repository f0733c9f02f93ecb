"""The C++ kernels as operations on tensors. Each operation checks its arguments, allocates its results, and uses as
many threads as torch.

`native` loads the kernels. Every operation raises RuntimeError for tensors that do not fit together.

Shape letters: T tokens, B rows (new tokens of a generation step), N heads, G kv heads, H head dim, K inputs or selected
keys, P panels of 32 outputs.
"""

import ctypes
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, get_num_threads

from baton.modeling.kernels.calls.checks import (
    FLOATS,
    NO_TABLE,
    KeyLists,
    RowKeys,
    Table,
    block_tables,
    numbers,
    optional,
    require,
    row_keys,
)
from baton.modeling.kernels.calls.library import Library
from baton.modeling.kernels.calls.panels import PANEL, BoundPanels
from baton.modeling.kernels.calls.sparse_operators import SparseOperators

_FourNumbers = ctypes.c_int64 * 4


class Operators(SparseOperators):
    """All kernels that were built for one instruction set."""

    def __init__(self, libraries: dict[str, Library]) -> None:
        """Create the operators. `libraries` contains one library for each entry of `native.FOLDERS`."""
        super().__init__(libraries["sparse"])
        attention, layers, sampling = libraries["attention"], libraries["layers"], libraries["sampling"]
        self.has_dots = libraries["linear"].says("has_dots")
        """True if the library uses the processor's instructions for dot products of bf16."""
        self.has_tiles = libraries["linear"].says("has_tiles")
        self._linear = libraries["linear"].function("linear", "pnnpnnnpppdbbppnpst")
        self._dequantised_rows = libraries["linear"].function("dequantised_rows", "pnppnpst")
        self._turn_heads = layers.function("turn_heads", "pppnnnnnbt")
        self._append_kv = attention.function("append_kv", "pppnnnpppnn")
        self._decode_attention = attention.function("decode_attention", "pnnppnnnnpppnpppnnbst")
        self._prefill_attention = attention.function("prefill_attention", "ppppnppnnnnpbbst")
        self._largest_tokens = sampling.function("largest_tokens", "pnnnpt")
        self._draw_tokens = sampling.function("draw_tokens", "pnnnpnppppppt")
        self._new_layers = layers.function("decode_layers_new", "nnnssp")
        self._add_layer = layers.function("decode_layers_add", "ppnnnpppdbbp")
        self._run_layers = layers.function("decode_layers_run", "pppppnpppnpppnnt")
        self._free_layers = layers.destructor("decode_layers_free")

    def linear(
        self, x_TK: Tensor, weights: BoundPanels, gain_K: Tensor | None, eps: float, residual_TN: Tensor | None = None
    ) -> Tensor:
        """Return the result `[T, N]` of the linear layer, plus `residual_TN` if given. If `gain_K` is given, RMSNorm is
        applied to `x_TK` first. If the weights are gated, the gate is applied. The rows of `x_TK` and of the residual
        do not need to be adjacent in memory."""
        (T, K), (x_row, x_column) = x_TK.shape, x_TK.stride()
        if x_TK.dtype is not torch.bfloat16 or not x_TK.is_cpu or x_column != 1 or weights.num_inputs != K:
            raise RuntimeError("x must be bfloat16 rows of the inputs")
        gain = None if gain_K is None else numbers(gain_K, torch.bfloat16, K, "a gain must be [K] bfloat16, contiguous")
        y_TN = torch.empty((T, weights.num_outputs), dtype=torch.bfloat16)
        residual, residual_row = None, 0
        if residual_TN is not None:
            residual_row, column = residual_TN.stride()
            if residual_TN.dtype is not torch.bfloat16 or residual_TN.shape != y_TN.shape or column != 1:
                raise RuntimeError("residual must be bfloat16 rows like the result")
            residual = residual_TN.data_ptr()
        self._linear(
            *(x_TK.data_ptr(), T, x_row, *weights.addresses, gain, eps, weights.gated, weights.is_int8, weights.codes),
            *(residual, residual_row, y_TN.data_ptr(), weights.product, get_num_threads()),
        )
        return y_TN

    def dequantised_rows(self, weights: BoundPanels, rows_T: Tensor) -> Tensor:
        """Return rows `[T, K]` of stored weights in fp32, as they are multiplied. `rows_T` contains their places among
        the outputs of the panels."""
        rows = numbers(rows_T, torch.int64, T := rows_T.numel(), "rows must be int64, contiguous")
        panels, num_panels, num_inputs, *_ = weights.addresses
        assert num_panels is not None and weights.codes is not None
        require(not T or 0 <= int(rows_T.min()) <= int(rows_T.max()) < num_panels * PANEL, "there are no such rows")
        y_TK = torch.empty((T, weights.num_inputs))
        arguments = panels, num_inputs, weights.codes, rows, T, y_TK.data_ptr(), weights.product, get_num_threads()
        self._dequantised_rows(*arguments)
        return y_TK

    def turn_heads(self, x_TKH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> None:
        """Rotate heads in place with the cosines and sines of RoPE. The sines must be negated in the first half of each
        head."""
        dtype = x_TKH.dtype
        if dtype not in FLOATS:
            raise RuntimeError("heads are bfloat16 or float32")
        if x_TKH.dim() != 3 or not x_TKH.is_cpu or x_TKH.stride(2) != 1:
            raise RuntimeError("heads must be [T, K, H], each contiguous")
        T, K, H = x_TKH.shape
        factors = "cosines and sines must be [T, H], of the heads' dtype"
        cos, sin = numbers(cos_TH, dtype, T * H, factors), numbers(sin_TH, dtype, T * H, factors)
        strides = x_TKH.stride()[:2]
        is_bf16 = dtype is torch.bfloat16
        self._turn_heads(x_TKH.data_ptr(), cos, sin, T, K, H, *strides, is_bf16, get_num_threads())

    def append_kv(
        self,
        k_BGH: Tensor,
        v_BGH: Tensor,
        addresses_B: Tensor,
        lengths_B: Tensor,
        table: Table = NO_TABLE,
    ) -> None:
        """Store the key and value of each row (new token) in the KV memory of its sequence. `lengths_B` contains the
        number of keys of each row, including the new key, which becomes the last one."""
        _check_rows(k_BGH)
        _check_rows(v_BGH)
        require(v_BGH.shape == k_BGH.shape and v_BGH.dtype is k_BGH.dtype, "keys and values have one shape")
        B, G, H = k_BGH.shape
        size = k_BGH.element_size()
        (k_row, k_head, _), (v_row, v_head, _) = k_BGH.stride(), v_BGH.stride()
        strides = _FourNumbers(size * k_row, size * k_head, size * v_row, size * v_head)
        lengths = numbers(lengths_B, torch.int64, B, "a length for each row, int64, contiguous")
        addresses = _addresses(addresses_B, B)
        self._append_kv(
            *(k_BGH.data_ptr(), v_BGH.data_ptr(), ctypes.addressof(strides), B, G, H * size, addresses),
            *(lengths, *block_tables(table, B)),
        )

    def decode_attention(
        self,
        q_BNH: Tensor,
        keys: RowKeys,
        num_kv_heads: int,
        product: str,
        picks: KeyLists | None = None,
    ) -> Tensor:
        """Return the attention output `[B, N, H]` of rows (new tokens). `keys` describes the keys of each row. If
        `picks` is given, a row attends only to its selected keys. `product` is a multiplication method of
        `baton.modeling.kernels.products`."""
        _check_rows(q_BNH)
        B, N, H = q_BNH.shape
        require(keys.lengths_B.numel() == B, "a length for each row")
        arguments = row_keys(keys, num_kv_heads, picks)
        o_BNH = torch.empty((B, N, H), dtype=q_BNH.dtype)
        self._decode_attention(
            *(q_BNH.data_ptr(), *q_BNH.stride()[:2], o_BNH.data_ptr(), _addresses(keys.addresses_B, B)),
            *(B, N, num_kv_heads, H, *arguments, q_BNH.dtype is torch.bfloat16, product.encode(), get_num_threads()),
        )
        return o_BNH

    def prefill_attention(
        self, q_TNH: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], causal: bool, product: str
    ) -> tuple[Tensor, Tensor]:
        """Return the attention output `[T, N, H]` and the log-sum-exp `[T, N]` of the scores. `keys` and `values` are
        lists of tensors `[S, G, H]`, one for each segment of keys. Queries attend to all keys of all segments. If
        `causal` is set, the last segment is masked: query t attends only to keys 0 to t of this segment."""
        dtype = q_TNH.dtype
        require(q_TNH.dim() == 3 and q_TNH.stride(2) == 1, "queries have 3 dimensions, the last contiguous")
        require(dtype in FLOATS and q_TNH.is_cpu, "queries must be bfloat16 or float32")
        require(0 < len(keys) == len(values), "every piece has keys and values")
        for k_SGH, v_SGH in zip(keys, values, strict=True):
            _check_piece(q_TNH, k_SGH, v_SGH, keys[0])
        T, N, H = q_TNH.shape
        o_TNH, lse_TN = torch.empty((T, N, H), dtype=dtype), torch.empty((T, N), dtype=torch.float32)
        pointers, lengths = ctypes.c_void_p * len(keys), ctypes.c_int64 * len(keys)
        strides = (ctypes.c_int64 * 6)(*(each for x in (q_TNH, keys[0], values[0]) for each in x.stride()[:2]))
        pieces = (
            pointers(*(each.data_ptr() for each in keys)),
            pointers(*(each.data_ptr() for each in values)),
            lengths(*(len(each) for each in keys)),
        )
        self._prefill_attention(
            *(
                q_TNH.data_ptr(),
                *(ctypes.addressof(each) for each in pieces),
                len(keys),
                o_TNH.data_ptr(),
                lse_TN.data_ptr(),
            ),
            *(T, N, keys[0].shape[1], H, ctypes.addressof(strides), causal, dtype is torch.bfloat16),
            *(product.encode(), get_num_threads()),
        )
        return o_TNH, lse_TN

    def largest_tokens(self, logits_BV: Tensor) -> Tensor:
        """Return the index of the largest logit of each row, `[B]`. For equal logits, the lower index is returned. The
        result is -1 for a row that contains NaN or plus infinity."""
        B, V = _logits(logits_BV)
        tokens_B = torch.empty(B, dtype=torch.int64)
        self._largest_tokens(logits_BV.data_ptr(), B, V, logits_BV.stride(0), tokens_B.data_ptr(), get_num_threads())
        return tokens_B

    def draw_tokens(
        self,
        logits_BV: Tensor,
        rows_R: Tensor,
        draws: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    ) -> Tensor:
        """Draw a token from each of the rows `rows_R` of the logits. Return the token ids, `[R]`. The result is -1 for
        a row whose largest logit is not finite.

        `draws`: keys of the noise, top-k, logarithms of min-p, top-p, and temperatures, each `[R]`.
        """
        B, V = _logits(logits_BV)
        R, (keys_R, top_k_R, floors_R, top_p_R, temperatures_R) = rows_R.numel(), draws

        def each(tensor: Tensor, dtype: torch.dtype, what: str) -> int:
            return numbers(tensor, dtype, R, f"{what} must be {dtype}, one for each row that draws")

        rows, keys = each(rows_R, torch.int64, "rows"), each(keys_R, torch.int64, "keys")
        top_k, floors = each(top_k_R, torch.int64, "top_k"), each(floors_R, torch.float64, "floors")
        top_p, temperatures = each(top_p_R, torch.float64, "top_p"), each(temperatures_R, torch.float32, "temperatures")
        tokens_R = torch.empty(R, dtype=torch.int64)
        self._draw_tokens(
            *(logits_BV.data_ptr(), B, V, logits_BV.stride(0), rows, R, keys, top_k, floors, top_p, temperatures),
            *(tokens_R.data_ptr(), get_num_threads()),
        )
        return tokens_R

    def decode_layers(self, heads: tuple[int, int, int], linears: str, scores: str) -> "DecodeLayers":
        """Return an empty DecodeLayers, to which layers can be added. `heads`: number of heads, number of kv heads, and
        head dim. `linears` and `scores`: multiplication methods of linear layers and of attention
        (`baton.modeling.kernels.products`)."""
        return DecodeLayers(self, heads, linears, scores)


class DecodeLayers:
    """All layers of a model, run by one native call. Several threads may call `run` at the same time."""

    def __init__(self, operators: Operators, heads: tuple[int, int, int], linears: str, scores: str) -> None:
        made = ctypes.c_void_p()
        operators._new_layers(*heads, linears.encode(), scores.encode(), ctypes.addressof(made))
        assert made.value is not None
        self._layers, self._operators = made.value, operators
        self._linears, (_, self._num_kv_heads, self._head_dim) = linears.encode(), heads
        self._held = list[tuple[BoundPanels, Tensor | None]]()
        weakref.finalize(self, operators._free_layers, made.value)

    def add(self, weights: BoundPanels, gain_K: Tensor | None, eps: float) -> None:
        """Add the next linear layer. `gain_K` is the gain of the RMSNorm before it, or None if it has no norm. Each
        decoder layer has four linear layers, in this order: QKV, output, gate and up, down."""
        require(weights.product == self._linears, "all linear layers multiply in one way")
        gain = optional(gain_K, torch.bfloat16, weights.num_inputs, "a gain must be [K] bfloat16, contiguous")
        formats = weights.gated, weights.is_int8, weights.codes
        self._operators._add_layer(self._layers, *weights.addresses, gain, eps, *formats)
        self._held.append((weights, gain_K))

    def run(
        self, hidden_TD: Tensor, factors: tuple[Tensor, Tensor], keys: RowKeys, picks: KeyLists | None = None
    ) -> None:
        """Run all layers on the hidden states, in place, and append the keys and values of the new tokens to the KV of
        their sequences.

        `factors`: cosines and sines of RoPE, both `[T, H]`. `keys`: keys of the new tokens, with the addresses of all
        layers, `[L, T]`. If `picks` is given, tokens attend only to the selected keys.
        """
        T, num_layers = len(hidden_TD), len(self._held) // 4
        require(num_layers > 0, "layers are not complete")
        num_hidden, num_factors = T * self._held[0][0].num_inputs, T * self._head_dim
        hidden = numbers(hidden_TD, torch.bfloat16, num_hidden, "hidden states must be [T, D] bfloat16, contiguous")
        cos, sin = (
            numbers(each, torch.bfloat16, num_factors, "cosines and sines must be [T, H] bfloat16") for each in factors
        )
        addresses = numbers(keys.addresses_B, torch.int64, num_layers * T, "addresses must be [L, T] int64, contiguous")
        require(keys.lengths_B.numel() == T, "a length for each row")
        arguments = row_keys(keys, self._num_kv_heads, picks, num_layers=num_layers)
        self._operators._run_layers(self._layers, hidden, cos, sin, addresses, T, *arguments, get_num_threads())


def _check_rows(rows: Tensor) -> None:
    if rows.dtype not in FLOATS or not rows.is_cpu:
        raise RuntimeError("rows are bfloat16 or float32")
    if rows.dim() != 3 or rows.stride(2) != 1:
        raise RuntimeError("rows must be [B, heads, H], each head contiguous")


def _addresses(addresses_B: Tensor, num_rows: int) -> int:
    return numbers(addresses_B, torch.int64, num_rows, "an address for each row, int64, contiguous")


def _check_piece(q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, first_SGH: Tensor) -> None:
    """Check a piece's keys and values. All pieces must have the strides of the first."""
    require(k_SGH.dim() == v_SGH.dim() == 3, "keys and values have 3 dimensions")
    require(k_SGH.dtype is v_SGH.dtype is q_TNH.dtype and k_SGH.is_cpu, "keys and values must be as queries are")
    require(k_SGH.stride(2) == 1 and v_SGH.stride(2) == 1, "head dim must be contiguous")
    have_shape = v_SGH.shape == k_SGH.shape and k_SGH.shape[2] == q_TNH.shape[2]
    require(have_shape, "keys and values have one shape, heads one dim")
    are_alike = k_SGH.shape[1] == first_SGH.shape[1] and k_SGH.stride() == first_SGH.stride() == v_SGH.stride()
    require(are_alike, "all pieces have the same kv heads and strides")


def _logits(logits_BV: Tensor) -> tuple[int, int]:
    has_dtype = logits_BV.dtype is torch.float32 and logits_BV.is_cpu and logits_BV.dim() == 2
    fits = has_dtype and logits_BV.stride(1) == 1 and logits_BV.shape[1] > 0
    require(fits, "logits must be [B, V], float32, each row contiguous")
    B, V = logits_BV.shape
    return B, V
