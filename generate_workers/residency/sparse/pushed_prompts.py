"""The queries of a prompt whose KV was pushed: nobody sent them, so the prompt is run again to have them.

For that its tokens must be known, and residency policies see none. But in layer 0 a token's value depends on the token
alone, since RoPE turns keys only: it is the projection of the normed embedding. So the tokens are those of the
vocabulary whose values are the pushed ones. Tokens with equal values cannot be told apart: either is taken;
when no token comes near, ModelError says so, and nothing is guessed. Models with learned positions add these to what
layer 0 sees, and are refused.

The second run attends to the pushed KV, not to KV of its own, and writes none. It costs what a local prefill costs.
Step 8 of a request's way (DESIGN.md, section 4), on the engine's thread, under torch.inference_mode().

T tokens, N heads, G kv heads, H head dim, V vocabulary, C = G x H.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from baton.errors import ConfigError, ModelError
from baton.types import TokenRange
from modeling.forward.decoder import Decoder, Step
from modeling.forward.positions import LearnedTable
from modeling.kv.buffers import KvBuffer

UseQueries = Callable[[int, Tensor, TokenRange], None]
"""Is given a layer, its queries `[T, N, H]` as attention compares them, and whose they are."""

_CHUNK_TOKENS = 512
_FARTHEST = 0.1
"""How far a pushed value may be from the vocabulary's, as a part of its length: bf16, by whatever kernel, makes one
hundredth."""


class PushedPrompts:
    """Runs pushed prompts again."""

    def __init__(self, decoder: Decoder) -> None:
        """Raises ConfigError for models with learned positions."""
        if isinstance(decoder.weights.positions, LearnedTable):
            remedy = "use residency device or host"
            raise ConfigError(f"residency h2o is not there for models with learned positions: {remedy}")
        self._decoder = decoder
        self._vocabulary_VC: Tensor | None = None
        """The values of all tokens, from the first pushed prompt on."""

    def run(self, buffer: KvBuffer, tokens: TokenRange, use: UseQueries) -> None:
        """Gives `use` the queries of `tokens`, whose KV lies in the buffer, as does all before: chunk by chunk, and of
        each chunk layer by layer. Raises ModelError when the KV is not that of this model's tokens."""
        decoder = self._decoder
        for part in tokens.split(_CHUNK_TOKENS):
            token_ids = self.token_ids(buffer, part)
            step = Step(decoder.weights.positions.lookup(torch.arange(part.start, part.end)), spans=())
            hidden_TD = decoder.embed(token_ids, step)
            for layer in range(decoder.layout.num_layers):
                q_TNH = decoder.project(layer, hidden_TD, step)
                use(layer, q_TNH, part)
                attention = decoder.attention(layer, q_TNH, part.start)
                attention.add(buffer.rows(layer, TokenRange(0, part.end)))
                hidden_TD = decoder.complete(layer, hidden_TD, attention.result())

    def token_ids(self, buffer: KvBuffer, tokens: TokenRange) -> list[int]:
        """The tokens, by their values in layer 0. Raises ModelError when these are no token's."""
        if self._vocabulary_VC is None:
            self._vocabulary_VC = self._values()
        v_TC = buffer.rows(0, tokens).v_SGH.flatten(1).float()
        half_squares_V = self._vocabulary_VC.square().sum(1) / 2
        ids_T = (v_TC @ self._vocabulary_VC.T - half_squares_V).argmax(1)
        distances_T = (self._vocabulary_VC[ids_T] - v_TC).norm(dim=1)
        is_far_T = ~(distances_T <= _FARTHEST * v_TC.norm(dim=1))
        if is_far_T.any():
            at = tokens.start + int(is_far_T.nonzero()[0])
            raise ModelError(f"the pushed KV of position {at} is of no token of this model: check what pushes it")
        return [int(token_id) for token_id in ids_T]

    def _values(self) -> Tensor:
        """Of the whole vocabulary in layer 0, fp32 `[V, C]`."""
        decoder, parts = self._decoder, self._decoder.weights.layers[0]
        values = []
        for part in TokenRange(0, decoder.config.vocab_size).split(_CHUNK_TOKENS):
            hidden_TD = decoder.weights.embedding.rows(torch.arange(part.start, part.end))
            qkv_TC = parts.qkv(hidden_TD, parts.attention_norm)
            values.append(qkv_TC[:, -decoder.config.num_kv_heads * decoder.config.head_dim :].float())
        return torch.cat(values)
