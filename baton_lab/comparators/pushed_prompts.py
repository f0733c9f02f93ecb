"""Recovers the queries of a prompt whose KV was pushed. Only KV is pushed, so the prompt is rerun to compute the
queries.

Used by residency `h2o`, on the engine's thread, under torch.inference_mode(). Rerunning a prompt needs its token ids,
which residency policies do not receive. The token ids are recovered from the values (V) of layer 0. The value of a
token in layer 0 depends on this token alone: it is the projection of the normed embedding, and RoPE rotates only
queries and keys. Each token id is found by comparing the pushed value with the values of the whole vocabulary. Tokens
with equal values cannot be distinguished; one of them is used. If no token is close enough, ModelError is raised.
Models with learned positions are not supported, because they add the positions to the input of layer 0.

The rerun attends to the pushed KV and stores no KV. It costs as much as a local prefill.

T tokens of a chunk, S tokens up to the end of the chunk, N heads, G kv heads, H head dim, V vocabulary, C = G x H.
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
"""Function that receives the queries of some tokens. Its arguments are the layer, the queries `[T, N, H]` (after RoPE),
and the range of the tokens."""

ReadKv = Callable[[int, TokenRange], Tensor]
"""Function that returns the KV `[T, 2, G, H]` of a token range in a layer."""

_CHUNK_TOKENS = 512
_FARTHEST = 0.1
"""Maximum distance between the pushed value (V) of a token and the closest value in the vocabulary, as a fraction of
the pushed value's norm. In bf16, the distance is usually about 0.01."""


class PushedPrompts:
    """Recovers the queries of prompts whose KV was pushed, by running the prompts again."""

    def __init__(self, decoder: Decoder) -> None:
        """Prepare to rerun prompts with `decoder`. Raises ConfigError for models with learned positions."""
        if isinstance(decoder.weights.positions, LearnedTable):
            remedy = "use residency device or host"
            raise ConfigError(f"residency h2o is not supported for models with learned positions: {remedy}")
        self._decoder = decoder
        self._vocabulary_VC: Tensor | None = None
        """Values (V) in layer 0 of all tokens of the vocabulary. None until the first pushed prompt is rerun."""

    def run(self, read: ReadKv, tokens: TokenRange, use: UseQueries) -> None:
        """Compute the queries of `tokens` and pass them to `use`, chunk by chunk, and layer by layer within a chunk.
        `read` must return the stored KV of `tokens` and of all tokens before them. Raises ModelError if the token ids
        cannot be recovered from the KV."""
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
        """Return the ids of `tokens`, recovered from their values (V) in layer 0. Raises ModelError if such a value is
        not close to the value of any token in the vocabulary."""
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
