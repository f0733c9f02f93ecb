"""Recovers the queries of a prompt whose KV was pushed. Queries are never pushed, so the prompt is rerun.

Residency `h2o` uses it, on the engine's thread, under torch.inference_mode(). Rerunning a prompt needs its token ids,
which residency policies do not receive. But in layer 0 a token's value depends on the token alone, since RoPE rotates
keys only: it is the projection of the normed embedding. So each token id is found by comparing the pushed value with
the values of the whole vocabulary. Tokens with equal values cannot be distinguished; one of them is used. If no token
is close enough, ModelError is raised. Models with learned positions add these to the input of layer 0, and are not
supported.

The rerun attends to the pushed KV, not to KV of its own, and writes none. It costs as much as a local prefill.

T tokens, S tokens up to them, N heads, G kv heads, H head dim, V vocabulary, C = G x H.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from baton.errors import ConfigError, ModelError
from baton.modeling.forward.decoder import Decoder, Step
from baton.modeling.forward.positions import LearnedTable
from baton.modeling.kv.buffers import KvRows
from baton.types import TokenRange

UseQueries = Callable[[int, Tensor, TokenRange], None]
"""Function that takes a layer, its queries `[T, N, H]` as attention uses them, and the range of their tokens."""

ReadKv = Callable[[int, TokenRange], Tensor]
"""Function that returns the KV of a range of tokens in a layer, `[T, 2, G, H]`."""

_CHUNK_TOKENS = 512
_FARTHEST = 0.1
"""Maximum distance between a pushed value and the vocabulary's, relative to its norm: about 0.01 is usual in bf16."""


class PushedPrompts:
    """Reruns pushed prompts to get their queries."""

    def __init__(self, decoder: Decoder) -> None:
        """Raises ConfigError for models with learned positions."""
        if isinstance(decoder.weights.positions, LearnedTable):
            remedy = "use residency device or host"
            raise ConfigError(f"residency h2o is not supported for models with learned positions: {remedy}")
        self._decoder = decoder
        self._vocabulary_VC: Tensor | None = None
        """Values of all tokens in layer 0, computed at the first pushed prompt."""

    def run(self, read: ReadKv, tokens: TokenRange, use: UseQueries) -> None:
        """Pass the queries of `tokens` to `use`, chunk by chunk, and layer by layer within a chunk. `read`: returns the
        KV of any tokens up to `tokens.end`. Raises ModelError when the KV does not belong to tokens of this model."""
        decoder = self._decoder
        for part in tokens.split(_CHUNK_TOKENS):
            token_ids = self.token_ids(read, part)
            step = Step(decoder.weights.positions.lookup(torch.arange(part.start, part.end)), spans=())
            hidden_TD = decoder.embed(token_ids, step)
            for layer in range(decoder.layout.num_layers):
                q_TNH = decoder.project(layer, hidden_TD, step)
                use(layer, q_TNH, part)
                attention = decoder.attention(layer, q_TNH, part.start)
                kv_S2GH = read(layer, TokenRange(0, part.end))
                attention.add(KvRows(kv_S2GH[:, 0], kv_S2GH[:, 1], 0))
                hidden_TD = decoder.complete(layer, hidden_TD, attention.result())

    def token_ids(self, read: ReadKv, tokens: TokenRange) -> list[int]:
        """Return the ids of `tokens`, found by their values in layer 0. Raises ModelError when a value belongs to no
        token."""
        if self._vocabulary_VC is None:
            self._vocabulary_VC = self._values()
        v_TC = read(0, tokens)[:, 1].flatten(1).float()
        half_squares_V = self._vocabulary_VC.square().sum(1) / 2
        ids_T = (v_TC @ self._vocabulary_VC.T - half_squares_V).argmax(1)
        distances_T = (self._vocabulary_VC[ids_T] - v_TC).norm(dim=1)
        is_far_T = ~(distances_T <= _FARTHEST * v_TC.norm(dim=1))
        if is_far_T.any():
            at = tokens.start + int(is_far_T.nonzero()[0])
            raise ModelError(f"the pushed KV of position {at} is of no token of this model: check what pushes it")
        return [int(token_id) for token_id in ids_T]

    def _values(self) -> Tensor:
        """Return the values of the whole vocabulary in layer 0, fp32 `[V, C]`."""
        decoder, parts = self._decoder, self._decoder.weights.layers[0]
        values = []
        for part in TokenRange(0, decoder.config.vocab_size).split(_CHUNK_TOKENS):
            hidden_TD = decoder.embeddings(torch.arange(part.start, part.end))
            qkv_TC = parts.qkv(hidden_TD, parts.attention_norm)
            values.append(qkv_TC[:, -decoder.config.num_kv_heads * decoder.config.head_dim :].float())
        return torch.cat(values)
