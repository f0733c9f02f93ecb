"""The decoder: one forward pass over ragged spans of tokens, for all model families.

A span is a run of consecutive new tokens of one sequence, with access to the sequence's KV. Whole prefill, a chunk of a
prefill chain, chunked local prefill, a decode step and a multi-token verification differ only in their spans. The
tokens of all spans are concatenated for the linear layers. Attention is computed for each span over its own keys. The
QKV projections are fused into one linear layer, and so are gate and up.

For each layer, `project` writes the new keys (after RoPE) and values to the KV memory and returns the queries.
`complete` runs the rest of the layer on the attention output. A prefill chain (`prefill_workers`) computes its own
attention between the two calls. A generation step (`generate_workers.engine.model_runner`) calls `forward` instead.

This module does not depend on the parts of a layer (`baton.modeling.forward.layers`) or on the position scheme
(`baton.modeling.forward.positions`). Both are stored in the weights.

Runs on the caller's thread. The only state is the weights. Calls of one decoder on several CUDA streams must not
overlap.

Shape letters: T tokens of all spans, D hidden size, N heads, G kv heads, H head dim, V vocabulary size, R rows of
logits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from baton.modeling.device.cpu import CpuDevice
from baton.modeling.device.port import Device
from baton.modeling.device.sending import to_device
from baton.modeling.forward.attention import Attention, Kernel, default_kernel, on_device
from baton.modeling.forward.decode_rows import DecodeRows, has_native_rows
from baton.modeling.forward.fused_layers import fuse
from baton.modeling.forward.layers import Layer
from baton.modeling.forward.linear import Linear
from baton.modeling.forward.model_config import ModelConfig
from baton.modeling.forward.norms import Transform
from baton.modeling.forward.positions import Positions, PositionTable
from baton.modeling.forward.selection import Picks, StepPicks
from baton.modeling.forward.triton.attention import triton_kernel
from baton.modeling.forward.triton.triton_rows import TritonRows
from baton.modeling.kernels.triton.launch import compiles_for
from baton.modeling.kv.buffers import KvPlace, KvRows
from baton.modeling.kv.pages import PageSpan
from baton.types import KvLayout, TokenRange


class Span(Protocol):
    """Consecutive new tokens of one sequence, and the memory for their KV."""

    @property
    def tokens(self) -> TokenRange:
        """Return the positions of the new tokens."""

    def own(self, layer: int) -> Tensor:
        """Return the memory for the keys and values of the new tokens in a layer: a view `[len(tokens), 2, G, H]`."""


class SequenceSpan(Span, Protocol):
    """Span (consecutive new tokens of one sequence) with access to all keys to which the tokens attend."""

    def segments(self, layer: int) -> Iterator[KvRows]:
        """Yield all keys and values to which the new tokens attend in `layer`, including their own, in pieces that do
        not overlap."""

    def place(self) -> KvPlace | None:
        """Return the location of the sequence's keys, for kernels that read keys by address. The keys must be
        contiguous in CPU memory in every layer, or in pages of device memory. None: such kernels cannot read the
        keys."""


class PassingSpan:
    """Base class for spans (consecutive new tokens of one sequence) whose KV passes through one buffer. Their method
    `segments` yields one segment of KV after another in this buffer. A segment is valid only until the next one is
    requested."""


class LayerTurns(Protocol):
    """Callbacks during a forward pass, called for each layer: before the layer, between the computation of its queries
    and its attention, and after the layer. Residency policies that store KV in host memory fetch or select keys in
    these callbacks."""

    def begin(self, layer: int, hidden_TD: Tensor) -> None:
        """Make the keys of `layer` available for the attention of all sequences of the step. The decoder calls this
        method before it runs the layer on the hidden states `hidden_TD`."""

    def picks(self, layer: int, q_TNH: Tensor) -> Picks | None:
        """Return the keys that are selected for attention in `layer`, in the order of the step's rows. A row is a
        sequence with one new token whose attention is computed together with that of the other rows
        (`baton.modeling.forward.decode_rows`). None: the rows attend to all keys.

        `q_TNH` contains the queries of all tokens of the step, after RoPE. The keys of the new tokens have already been
        written. The decoder calls this method once per layer if the step has rows. All other sequences attend to all
        keys.
        """

    def end(self, layer: int) -> None:
        """Process the end of `layer`. The decoder calls this method after it has run the layer. The keys of the new
        tokens are then in the KV memory that the step uses, and the layer does not read this memory any more."""


@dataclass(frozen=True)
class DecoderWeights:
    """All parameters of a model, in the dtype of the computation, grouped into layers."""

    device: torch.device
    dtype: torch.dtype
    embedding: Linear
    """Embedding, as a linear layer with weight `[V, D]`. Row i of the weight is the embedding of token i."""
    positions: PositionTable
    layers: tuple[Layer, ...]
    final_norm: Transform
    head: Linear
    """Output head. The same object as `embedding` if both share the weight."""
    fingerprint: str
    """Hash of the loaded tensors, of the dtype, and of all settings that affect the KV."""
    embedding_scale: float = 1.0
    """Factor by which the embeddings of tokens are multiplied."""


@dataclass(frozen=True)
class Step:
    """State of one forward pass. All layers share it."""

    positions: Positions
    """Position information of all tokens of the step: cosines and sines (RoPE), or learned vectors."""
    spans: tuple[tuple[Span, slice], ...]
    """Pairs of a span (consecutive new tokens of one sequence) and the slice of its tokens among the tokens of the
    step. Spans whose attention the object in the field `rows` computes are not included."""
    rows: DecodeRows | TritonRows | None = None
    """Object that computes the attention of several sequences together: on a CPU of those with few new tokens, on a GPU
    of those with KV in pages. None if the step has no such sequences."""


class Decoder:
    """Model that is ready to run. Engines call all methods under torch.inference_mode()."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        kernel: Kernel | None = None,
        *,
        device: Device | None = None,
    ) -> None:
        """Create a decoder. `kernel`: attention kernel, or None for the fastest one. `device`: device of the weights
        and of all KV that attention reads, or None for the CPU."""
        self.config = config
        self.weights = weights
        self.device = device or CpuDevice()
        assert weights.device == self.device.torch_device, (weights.device, self.device.torch_device)
        self.dtype = weights.dtype
        self._has_no_windows = all(window is None for window in config.windows)
        self._has_native_rows = kernel is None and has_native_rows(weights.device, self.dtype, config.head_dim)
        self.has_triton_rows = kernel is None and compiles_for(weights.device, self.dtype)
        """True if Triton kernels compute the attention of those sequences of a step whose KV is in pages."""
        default = triton_kernel if self.has_triton_rows else default_kernel(weights.device, self.dtype)
        self.kernel = on_device(kernel or default, self.device)
        self.fused = fuse(weights.layers, weights.positions, config) if self._has_native_rows else None
        """Object that runs all layers in one native call. None if the layers or this machine do not support such a
        call."""
        self.layout = KvLayout(
            model_fingerprint=weights.fingerprint,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=str(self.dtype).removeprefix("torch."),
        )

    def begin(self, spans: Sequence[Span]) -> Step:
        """Return the state of a new forward pass. `spans` contains the consecutive new tokens of each sequence. Their
        positions must be below the length of the model's context."""
        return Step(self._positions(spans), tuple(_slices(spans)))

    def embed(self, token_ids: Sequence[int] | Tensor, step: Step) -> Tensor:
        """Return the input `[T, D]` of the first layer. `token_ids` contains the new tokens of all spans of `step`, in
        the order of the spans. If it is a tensor, it is int64 and on the device."""
        if not isinstance(token_ids, Tensor):
            token_ids = to_device(torch.tensor(token_ids), self.weights.device)
        return self.enter(token_ids, step.positions)

    def enter(self, token_ids_T: Tensor, positions: Positions) -> Tensor:
        """Return the input `[T, D]` of the first layer: the embeddings of the token ids, plus learned positions if the
        model has them. `token_ids_T` must be on the device."""
        hidden_TD = self.embeddings(token_ids_T)
        positions.enter(hidden_TD)
        return hidden_TD

    def embeddings(self, token_ids_T: Tensor) -> Tensor:
        """Return the embeddings `[T, D]` of token ids, multiplied by the model's `embedding_scale`. `token_ids_T` must
        be on the device."""
        hidden_TD, scale = self.weights.embedding.rows(token_ids_T), self.weights.embedding_scale
        return hidden_TD if scale == 1.0 else hidden_TD * scale

    def heads(self, layer: int, hidden_TD: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries `[T, N, H]`, keys `[T, G, H]` and values `[T, G, H]` of the tokens in a layer. Head norms
        and RoPE have been applied to queries and keys."""
        config, parts = self.config, self.weights.layers[layer]
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        qkv_TKH = parts.qkv(hidden_TD, parts.attention_norm).view(len(hidden_TD), -1, config.head_dim)
        qk_TKH = positions.turn(parts.head_norm(qkv_TKH.narrow(1, 0, num_heads + num_kv_heads)), layer)
        q_TNH, k_TGH = qk_TKH.narrow(1, 0, num_heads), qk_TKH.narrow(1, num_heads, num_kv_heads)
        return q_TNH, k_TGH, qkv_TKH.narrow(1, num_heads + num_kv_heads, num_kv_heads)

    def project(self, layer: int, hidden_TD: Tensor, step: Step) -> Tensor:
        """Write the keys and values of the new tokens to KV memory, and return the queries `[T, N, H]`."""
        q_TNH, k_TGH, v_TGH = self.heads(layer, hidden_TD, step.positions)
        if step.rows is not None:
            step.rows.append(layer, k_TGH, v_TGH)
        for span, where in step.spans:
            for part, own_T2GH in _owns(span, where, layer):
                self.device.require(own_T2GH.data_ptr(), own_T2GH.nbytes)
                own_T2GH[:, 0] = k_TGH[part]
                own_T2GH[:, 1] = v_TGH[part]
        return q_TNH

    def attention(self, layer: int, q_TNH: Tensor, first_position: int) -> Attention:
        """Return an Attention for the queries of consecutive tokens of one sequence, with the sliding window of the
        layer. `first_position` is the position of the first token. The caller must add the segments of keys."""
        return Attention(q_TNH, first_position, self.config.windows[layer], self.kernel)

    def complete(self, layer: int, hidden_TD: Tensor, attended_TNH: Tensor) -> Tensor:
        """Run the rest of a layer after the attention: output projection, residuals and MLP. Return the hidden states
        after the layer, `[T, D]`."""
        return self.weights.layers[layer].tail(hidden_TD, attended_TNH.flatten(1))

    def forward(
        self,
        token_ids: Sequence[int] | Tensor,
        spans: Sequence[SequenceSpan],
        turns: LayerTurns | None = None,
        *,
        most_queries: int = 1,
        picks: StepPicks | None = None,
        results: Sequence[int] | None = None,
    ) -> Tensor:
        """Run all layers on the new tokens, and return the hidden states of the tokens in `results`, `[R, D]`.

        `spans`: for each sequence a span, which is a run of consecutive new tokens with access to the sequence's KV.
        `token_ids`: the new tokens of all spans, concatenated; as numbers, or as a tensor on the device, int64.

        `turns`: callbacks before and after each layer. Callbacks that do not select keys leave the result bitwise
        unchanged.

        `most_queries`: on a CPU, maximum length of the spans whose attention is computed together in one kernel call
        per layer, which is fast for few tokens. In a model with sliding windows, only spans of one token are computed
        in this way. On a GPU with Triton, the attention of all spans in pages is computed together. Must be 1 if
        `turns` selects keys.

        `picks`: the keys to which the tokens attend, if they are known before the step. All spans must then have one
        new token and be supported by the native kernel (`baton.modeling.forward.decode_rows`), and `turns` must not
        select keys.

        `results`: indices of the tokens whose hidden states are needed, among the T new tokens; None: all. For the
        other tokens, the last layer computes only keys and values, and attention.
        """
        step, others = self._begin_ragged(spans, most_queries if self._has_no_windows else 1)
        assert picks is None or (step.rows is not None and not others and most_queries == 1), "only rows pick keys"
        hidden_TD = self.embed(token_ids, step)
        results_R = None
        if results is not None:
            results_R = to_device(torch.tensor(results, dtype=torch.int64), hidden_TD.device)
        fused = self.fused if turns is None else None
        if fused is not None and isinstance(step.rows, DecodeRows) and fused.fit(step.rows, len(hidden_TD)):
            hidden_TD = fused.run(hidden_TD, step.positions, step.rows, picks)
            return hidden_TD if results_R is None else hidden_TD[results_R]
        for layer in range(self.config.num_layers):
            if turns is not None:
                turns.begin(layer, hidden_TD)
            q_TNH = self.project(layer, hidden_TD, step)
            picked = turns.picks(layer, q_TNH) if turns is not None and step.rows is not None else None
            if picks is not None:
                picked = picks.of_layer(layer)
            attended_TNH = self._attend(layer, q_TNH, step.rows, others, picked)
            if results_R is not None and layer == self.config.num_layers - 1:  # only R tokens are left
                hidden_TD, attended_TNH = hidden_TD[results_R], attended_TNH[results_R]
            if len(hidden_TD):
                hidden_TD = self.complete(layer, hidden_TD, attended_TNH)
            if turns is not None:
                turns.end(layer)
        return hidden_TD

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return the next-token logits `[R, V]` in fp32 for the given hidden states."""
        return self.weights.head(hidden_RD, self.weights.final_norm).float()

    def _positions(self, spans: Sequence[Span]) -> Positions:
        ranges = (span.tokens for span in spans)
        return self.weights.positions.lookup(
            torch.tensor([at for each in ranges for at in range(each.start, each.end)])
        )

    def _begin_ragged(
        self, spans: Sequence[SequenceSpan], most_queries: int
    ) -> tuple[Step, list[tuple[SequenceSpan, slice]]]:
        """Return the state of a forward pass, and the spans whose attention must be computed one by one. The attention
        of all other spans is computed together."""
        others, together = [], []
        for span, where in _slices(spans):
            place = self._place(span, most_queries)
            if place is None:
                others.append((span, where))
            else:
                self._require(place)
                together.append((where.start, place))
        return Step(self._positions(spans), tuple(others), self._rows(together) if together else None), others

    def _place(self, span: SequenceSpan, most_queries: int) -> KvPlace | None:
        """Return the location of the span's keys, if the attention of the span can be computed together with that of
        other spans. Otherwise return None."""
        if self.has_triton_rows:
            place = span.place()
            return None if place is None or place.table is None else place
        return span.place() if self._has_native_rows and len(span.tokens) <= most_queries else None

    def _rows(self, spans: Sequence[tuple[int, KvPlace]]) -> DecodeRows | TritonRows:
        config = self.config
        if self.has_triton_rows:
            return TritonRows(spans, config.windows, config.num_heads // config.num_kv_heads)
        return DecodeRows(spans, self.layout.row_bytes, config.windows)

    def _require(self, place: KvPlace) -> None:
        """Raise WrongMemoryError unless the sequence's KV is in the device's memory."""
        if place.table is not None:
            first_PS2GH, last_PS2GH = place.table.data_LPS2GH[0], place.table.data_LPS2GH[-1]
            num_bytes = last_PS2GH.data_ptr() - first_PS2GH.data_ptr() + last_PS2GH.nbytes
            self.device.require(first_PS2GH.data_ptr(), num_bytes)
        else:
            num_bytes = (place.num_layers - 1) * place.layer_bytes + place.num_keys * self.layout.row_bytes
            self.device.require(place.address, num_bytes)
        if place.others is not None:
            self._require(place.others)

    def _attend(
        self,
        layer: int,
        q_TNH: Tensor,
        rows: DecodeRows | TritonRows | None,
        others: Sequence[tuple[SequenceSpan, slice]],
        picks: Picks | None,
    ) -> Tensor:
        """Return the attention output of all tokens of a step, `[T, N, H]`. If `picks` is given, the tokens of `rows`
        attend only to the selected keys. `others` contains the spans that are not in `rows`."""
        if isinstance(rows, TritonRows):
            out_TNH = rows.attend(layer, q_TNH, self.config.num_kv_heads, picks)
        else:
            out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        if isinstance(rows, DecodeRows):
            out_BNH = rows.attend(layer, q_TNH, self.config.num_kv_heads, picks)
            if not others:
                return out_BNH
            out_TNH[rows.tokens_B] = out_BNH
        for span, where in others:
            attention = self.attention(layer, q_TNH[where], span.tokens.start)
            if isinstance(span, PassingSpan):
                for piece in span.segments(layer):
                    attention.add(piece)
            else:
                attention.add(*span.segments(layer))
            out_TNH[where] = attention.result()
        return out_TNH


def _owns(span: Span, where: slice, layer: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield views of the memory for a span's new tokens in a layer. Each view is preceded by the slice of the step's
    tokens that it holds."""
    if not isinstance(span, PageSpan):
        yield where, span.own(layer)
        return
    for part, own_T2GH in span.owns(layer):
        start = where.start + part.start - span.tokens.start
        yield slice(start, start + len(part)), own_T2GH


S = TypeVar("S", bound=Span)


def _slices(spans: Sequence[S]) -> Iterator[tuple[S, slice]]:
    """Yield each span with its slice of the concatenated tokens of all spans."""
    start = 0
    for span in spans:
        yield span, slice(start, start + len(span.tokens))
        start += len(span.tokens)
