"""Runs all layers of a generation step in one native call (baton/modeling/kernels/layers/decode_layers.cpp).

The call supports the layer structure of most models of the Llama family. Its result is bitwise equal to that of
separate operations. It is faster because memory bandwidth limits a step, and between separate calls from Python the
memory would be idle. `decoder` uses it, on any thread, and on several threads at the same time.

Shape letters: T tokens (rows), D hidden size, N heads, G kv heads.
"""

from collections.abc import Sequence

from torch import Tensor

from baton.modeling.forward.decode_rows import DecodeRows
from baton.modeling.forward.layers import GatedMlp, Layer, Sequential
from baton.modeling.forward.linear import Linear, LinearByRows, PanelLinear
from baton.modeling.forward.model_config import ModelConfig
from baton.modeling.forward.norms import RmsNorm, Transform, unchanged
from baton.modeling.forward.positions import Positions, PositionTable
from baton.modeling.forward.rope import RotaryTable, Rotation
from baton.modeling.forward.selection import StepPicks
from baton.modeling.kernels import native
from baton.modeling.kernels.process_kernels import KERNELS

_MOST_ROWS = 288
"""Maximum number of rows (new tokens) that the kernel supports: 32 sequences, each with one token and eight drafts."""

_Linears = list[tuple[PanelLinear, Transform]]


class FusedLayers:
    """All layers of a model, run by one native call. Create it with `fuse`."""

    def __init__(
        self,
        linears: Sequence[tuple[PanelLinear, Transform]],
        config: ModelConfig,
        *,
        most_rows: int = _MOST_ROWS,
        attention_product: str | None = None,
        instruction_set: str = native.NATIVE,
    ) -> None:
        """Prepare the native call. The kernels must have been loaded.

        `linears`: the linear layers, four per decoder layer, in the order QKV, output, gate and up, down. Each is
        paired with the norm before it. All must use the same multiplication method. `most_rows`: maximum number of new
        tokens of a step, at most `_MOST_ROWS`. `attention_product`: multiplication method of attention, one of
        `baton.modeling.kernels.products`. None: the method that was chosen for this process.
        """
        self._most_rows = most_rows
        (product,) = {linear.product for linear, _ in linears}
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        scores = attention_product or KERNELS.choice.attention
        self._native = native.operators(instruction_set).decode_layers(heads, product, scores)
        for linear, norm in linears:
            self._native.add(*linear.described(norm))

    def fit(self, rows: DecodeRows, num_tokens: int) -> bool:
        """Return True if a step of `num_tokens` tokens can run in one native call. This is the case if `rows` contains
        all tokens of the step, in order, if there are at most `most_rows` of them, and if each token has the same
        number of keys in all layers."""
        is_plain = rows.in_order and rows.keys is not None
        return is_plain and len(rows.tokens_B) == num_tokens <= self._most_rows

    def run(self, hidden_TD: Tensor, positions: Positions, rows: DecodeRows, picks: StepPicks | None = None) -> Tensor:
        """Run all layers on hidden states `[T, D]` and return the result. Writes the keys and values of the new tokens
        to the KV memory of their sequences. If `hidden_TD` is contiguous, it is overwritten. If `picks` is given,
        tokens attend only to the selected keys. Each sequence must then have only one new token."""
        assert isinstance(positions, Rotation), positions
        hidden_TD = hidden_TD.contiguous()  # an embedding may be a part of wider rows
        turns = positions.cos_T1H, positions.sin_T1H
        keys, chosen = rows.keys, None
        assert keys is not None, "rows that `fit` took"
        if picks is not None:
            keys, chosen = keys._replace(queries_B=None, unseen_B2=None), (picks.keys_LBGK, picks.num_BG)
        self._native.run(hidden_TD, turns, keys, chosen)
        return hidden_TD


def fuse(layers: Sequence[Layer], positions: PositionTable, config: ModelConfig) -> FusedLayers | None:
    """Return a FusedLayers for the layers. None if the layers or this machine do not support running all layers in one
    native call."""
    has_windows = any(window is not None for window in config.windows)
    if has_windows or not isinstance(positions, RotaryTable) or not positions.in_place:
        return None
    linears: _Linears = []
    most_rows = _MOST_ROWS
    for layer in layers:
        found = _linears(layer)
        if found is None:
            return None
        linears += [(_panels(linear), norm) for linear, norm in found]
        most_rows = min(most_rows, *(_most_rows(linear) for linear, _ in found))
    return FusedLayers(linears, config, most_rows=most_rows) if linears and native.load() else None


def _panels(linear: PanelLinear | LinearByRows) -> PanelLinear:
    return linear.few if isinstance(linear, LinearByRows) else linear


def _most_rows(linear: PanelLinear | LinearByRows) -> int:
    """Return the maximum number of rows for which the C++ kernel computes the linear layer."""
    return linear.many_rows - 1 if isinstance(linear, LinearByRows) else _MOST_ROWS


def _linears(layer: Layer) -> list[tuple[PanelLinear | LinearByRows, Transform]] | None:
    """Return the linear layers of a layer, each with the norm before it. None if the layer has another structure."""
    tail = layer.tail
    if layer.head_norm is not unchanged or not isinstance(tail, Sequential) or not isinstance(tail.mlp, GatedMlp):
        return None
    mlp = tail.mlp
    pairs: list[tuple[Linear, Transform]] = [
        (layer.qkv, layer.attention_norm),
        (tail.output, unchanged),
        (mlp.gate_up, tail.norm),
        (mlp.down, unchanged),
    ]
    ours = [(linear, norm) for linear, norm in pairs if isinstance(linear, PanelLinear | LinearByRows)]
    are_rms = isinstance(layer.attention_norm, RmsNorm) and isinstance(tail.norm, RmsNorm)
    return ours if are_rms and len(ours) == len(pairs) else None
