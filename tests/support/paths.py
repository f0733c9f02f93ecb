"""Different methods to compute a sequence with the project's decoder. All must give the same results. Functions return
logits `[T, V]` unless stated otherwise."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from baton.modeling.forward.decoder import Decoder
from baton.modeling.kv.buffers import BufferSpan, KvBuffer
from baton.types import TokenRange


def buffer_for(decoder: Decoder, num_tokens: int) -> KvBuffer:
    """Return an empty buffer for a sequence. It is filled with NaN, so that reads of unwritten KV are detected."""
    buffer = KvBuffer(decoder.layout, TokenRange(0, num_tokens))
    buffer.data.fill_(float("nan"))
    return buffer


def filled(decoder: Decoder, lengths: Sequence[int], num_new: int = 1) -> list[KvBuffer]:
    """Return buffers with the KV of sequences, except for their last `num_new` tokens. `lengths`: number of tokens of
    each sequence up to the first missing one."""
    buffers = []
    for seed, length in enumerate(lengths):
        buffers.append(KvBuffer(decoder.layout, TokenRange(0, length + num_new - 1)))
        ids = torch.randint(90, (length - 1,), generator=torch.Generator().manual_seed(seed)).tolist()
        decoder.forward(ids, [BufferSpan(buffers[-1], TokenRange(0, length - 1))])
    return buffers


def advance(decoder: Decoder, buffer: KvBuffer, token_ids: Sequence[int], start: int) -> Tensor:
    """Return the logits of `token_ids` at positions from `start`. `buffer` holds the KV of all earlier tokens."""
    hidden_TD = advance_hidden(decoder, buffer, token_ids, start)
    return decoder.logits(hidden_TD)


def advance_hidden(decoder: Decoder, buffer: KvBuffer, token_ids: Sequence[int], start: int) -> Tensor:
    """Return the hidden states `[T, D]` of `token_ids` at positions from `start`. `buffer` holds the KV of all earlier
    tokens."""
    return decoder.forward(token_ids, [BufferSpan(buffer, TokenRange(start, start + len(token_ids)))])


def whole(decoder: Decoder, token_ids: Sequence[int]) -> Tensor:
    """Return the logits of all tokens, computed in one forward pass."""
    return advance(decoder, buffer_for(decoder, len(token_ids)), token_ids, 0)


def chunked_hidden(decoder: Decoder, buffer: KvBuffer, token_ids: Sequence[int], cuts: Sequence[int]) -> Tensor:
    """Return the hidden states `[T, D]` of all tokens, computed in chunks that end at `cuts`."""
    edges = [0, *cuts, len(token_ids)]
    parts = [advance_hidden(decoder, buffer, token_ids[start:end], start) for start, end in pairwise(edges)]
    return torch.cat(parts)


def random_cuts(num_tokens: int, max_chunk: int, seed: int) -> list[int]:
    """Return the ends of chunks of random sizes from 1 to `max_chunk`, without the last end, `num_tokens`."""
    generator = torch.Generator().manual_seed(seed)
    cuts: list[int] = []
    while True:
        end = (cuts[-1] if cuts else 0) + int(torch.randint(1, max_chunk + 1, (), generator=generator))
        if end >= num_tokens:
            return cuts
        cuts.append(end)


def in_single_steps(decoder: Decoder, token_ids: Sequence[int]) -> Tensor:
    """Return the hidden states `[T, D]` as generation computes them: each token is a separate sequence of one batch.
    All sequences share one buffer, so that a single batch replaces one step per token: in each layer, all keys are
    written before any query attends to them."""
    buffer = buffer_for(decoder, len(token_ids))
    return decoder.forward(token_ids, [BufferSpan(buffer, TokenRange(at, at + 1)) for at in range(len(token_ids))])


def rms_error(rounded: Decoder, hidden_TD: Tensor, exact: Decoder, exact_TD: Tensor) -> float:
    """Return the root mean square of logit differences over all positions. Logits are computed in blocks of
    positions."""
    total = 0.0
    for got_TD, expected_TD in zip(torch.split(hidden_TD, 256), torch.split(exact_TD, 256), strict=True):
        total += float((rounded.logits(got_TD) - exact.logits(expected_TD)).square().mean(1).sum())
    return math.sqrt(total / len(hidden_TD))
