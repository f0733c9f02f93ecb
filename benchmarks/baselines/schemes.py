"""Alternative schemes that prefill one prompt on several ranks. They are tensor-and-sequence parallel prefill (TSP) as
in the KV-Runahead paper, TSP with a causal kernel, and zigzag ring attention, the strongest recent alternative. All use
the decoder and the attention kernel of the chain.

Every rank calls the scheme's function with the same prompt and its own process group. The function returns when the
rank has finished its work. The rank that has the last token's hidden state returns its logits. In the last layer,
attention and MLP are computed only for the prompt's last token, as in the chain. The other ranks then only project and
send KV.

- `tsp_dense`, `tsp_causal`: all ranks have chunks of equal length. In each layer, all ranks gather all KV and wait for
  it. The dense kernel scores a chunk's queries against the whole prompt and masks half of the scores (Cho, Rastegari,
  Naik, 2024, section 3). It therefore also computes the scores of later keys, which are discarded.
- `zigzag`: the prompt is divided into 2 n chunks for n ranks. Rank i has chunks i and 2 n - 1 - i, so all ranks have
  equal work. KV circulates in a ring while the ranks attend to the blocks that have arrived (Brandon et al., 2023;
  Llama 3's context parallelism).

T tokens, N heads, G kv heads, H head dim; a KV block is `[tokens, 2, G, H]`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from baton.modeling.forward.attention import Attention
from baton.modeling.forward.decoder import Decoder
from baton.modeling.kv.buffers import KvRows
from baton.types import TokenRange

_FOREVER = timedelta(hours=1)
_TAG = 0


class Work(Protocol):
    """Interface of a handle on a running communication."""

    def wait(self, timeout: timedelta) -> bool: ...


class Group(Protocol):
    """Interface with the methods of torch's process groups that the schemes use."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def send(self, tensors: list[Tensor], target: int, tag: int) -> Work: ...
    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work: ...
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Work: ...


Prefill = Callable[[Decoder, Sequence[int], Group], Tensor | None]
"""Function that prefills a prompt with one scheme. Its arguments are the decoder, the token ids and the process group.
It returns the last token's logits `[1, V]` on the rank that has them, and None on the other ranks."""


@dataclass(frozen=True)
class _Chunk:
    """Consecutive tokens of one rank, with their KV of one layer. Implements the decoder's Span."""

    tokens: TokenRange
    kv: Tensor
    """KV of the tokens in the current layer, `[len(tokens), 2, G, H]`: K and V, G kv heads, H head dim. Each layer
    overwrites it."""

    def own(self, layer: int) -> Tensor:
        return self.kv


def tsp_dense(decoder: Decoder, token_ids: Sequence[int], group: Group) -> Tensor | None:
    """Prefill with tensor-and-sequence parallelism (TSP) and a dense kernel. This scheme is the baseline of the
    KV-Runahead paper. Return the last token's logits on the last rank, None on the others."""
    return _tsp(decoder, token_ids, group, dense=True)


def tsp_causal(decoder: Decoder, token_ids: Sequence[int], group: Group) -> Tensor | None:
    """Prefill with tensor-and-sequence parallelism (TSP) and a causal kernel, which does not compute masked scores. The
    last rank has the most work. Return the last token's logits on the last rank, None on the others."""
    return _tsp(decoder, token_ids, group, dense=False)


@torch.inference_mode()
def _tsp(decoder: Decoder, token_ids: Sequence[int], group: Group, *, dense: bool) -> Tensor | None:
    rank, num_ranks, total = group.rank(), group.size(), len(token_ids)
    width = -(-total // num_ranks)
    all_kv = _kv(decoder, width * num_ranks)  # padded, because a gather takes equal parts
    parts = list(torch.split(all_kv, width))
    tokens = TokenRange(min(rank * width, total), min((rank + 1) * width, total))
    chunk = _Chunk(tokens, _kv(decoder, width)[: len(tokens)])
    sent = _kv(decoder, width)
    step = decoder.begin([chunk])
    hidden_TD = decoder.embed(token_ids[tokens.start : tokens.end], step)
    for layer in range(decoder.config.num_layers):
        q_TNH = decoder.project(layer, hidden_TD, step)
        sent[: len(tokens)] = chunk.kv
        group.allgather([[part.view(torch.uint8) for part in parts]], [sent.view(torch.uint8)]).wait(_FOREVER)
        if layer == decoder.config.num_layers - 1:
            if rank < num_ranks - 1:
                return None
            q_TNH, hidden_TD = q_TNH[-1:], hidden_TD[-1:]
        attention = decoder.attention(layer, q_TNH, tokens.end - len(q_TNH))
        attention.add(_rows(all_kv[: tokens.end], 0))
        if dense and tokens.end < total:
            _pay_for(decoder, q_TNH, all_kv[tokens.end : total])
        hidden_TD = decoder.complete(layer, hidden_TD, attention.result())
    return decoder.logits(hidden_TD[-1:])


def _pay_for(decoder: Decoder, q_TNH: Tensor, kv: Tensor) -> None:
    """Compute attention to keys that are masked for all queries, as a dense kernel does."""
    decoder.kernel(q_TNH, [_rows(kv, 0)], False, None)


@torch.inference_mode()
def zigzag(decoder: Decoder, token_ids: Sequence[int], group: Group) -> Tensor | None:
    """Prefill with ring attention. Each rank has two chunks in zigzag order, one from each half of the prompt. The
    prompt must have at least two tokens per rank. Return the last token's logits on rank 0, None on the others."""
    rank, num_ranks, last_layer = group.rank(), group.size(), decoder.config.num_layers - 1
    ranges = _zigzag_ranges(len(token_ids), num_ranks)
    low, high = ranges[rank]
    blocks = [_kv(decoder, max(len(a) + len(b) for a, b in ranges)) for _ in range(3)]
    own = blocks[0][: len(low) + len(high)]
    chunks = [_Chunk(low, own[: len(low)]), _Chunk(high, own[len(low) :])]
    step = decoder.begin(chunks)
    hidden_TD = decoder.embed([*token_ids[low.start : low.end], *token_ids[high.start : high.end]], step)
    for layer in range(last_layer + 1):
        q_TNH = decoder.project(layer, hidden_TD, step)
        if layer < last_layer:
            places = [low, high]
        elif rank == 0:  # only the last token is needed, and rank 0 has it
            places, hidden_TD = [TokenRange(high.end - 1, high.end)], hidden_TD[-1:]
        else:
            places = []
        queries = [
            decoder.attention(layer, part_TNH, place.start)
            for part_TNH, place in zip(_parts(q_TNH, places), places, strict=True)
        ]
        _ring(ranges, queries, places, blocks, group)
        if not places:
            return None
        hidden_TD = decoder.complete(layer, hidden_TD, torch.cat([attention.result() for attention in queries]))
    return decoder.logits(hidden_TD)


def _parts(q_TNH: Tensor, places: Sequence[TokenRange]) -> Iterator[Tensor]:
    """Yield the queries of each range in `places`. They are the last rows of `q_TNH`."""
    start = len(q_TNH) - sum(len(place) for place in places)
    for place in places:
        yield q_TNH[start : start + len(place)]
        start += len(place)


def _ring(
    ranges: Sequence[tuple[TokenRange, TokenRange]],
    queries: Sequence[Attention],
    places: Sequence[TokenRange],
    blocks: list[Tensor],
    group: Group,
) -> None:
    """Send one layer's KV once around the ring. A rank attends to a block while it receives the next one. `blocks`: the
    rank's own block, and two buffers for those of other ranks."""
    rank, num_ranks = group.rank(), group.size()
    current, spare, other = blocks
    for turn in range(num_ranks):
        owner = (rank - turn) % num_ranks
        works = []
        if turn < num_ranks - 1:
            works.append(group.send([current.view(torch.uint8)], (rank + 1) % num_ranks, _TAG))
            works.append(group.recv([spare.view(torch.uint8)], (rank - 1) % num_ranks, _TAG))
        low, high = ranges[owner]
        parts = ((low, current[: len(low)]), (high, current[len(low) : len(low) + len(high)]))
        for attention, place in zip(queries, places, strict=True):  # skips chunks later than all these queries
            attention.add(*(_rows(kv, tokens.start) for tokens, kv in parts if tokens.start < place.end))
        for work in works:
            work.wait(_FOREVER)
        current, spare = spare, other if turn == 0 else current


def _zigzag_ranges(total: int, num_ranks: int) -> list[tuple[TokenRange, TokenRange]]:
    """Return the low and the high chunk of each rank."""
    edges = [total * index // (2 * num_ranks) for index in range(2 * num_ranks + 1)]
    chunks = [TokenRange(start, end) for start, end in pairwise(edges)]
    return [(chunks[rank], chunks[-1 - rank]) for rank in range(num_ranks)]


def _kv(decoder: Decoder, num_tokens: int) -> Tensor:
    layout = decoder.layout
    return torch.zeros(num_tokens, 2, layout.num_kv_heads, layout.head_dim, dtype=decoder.dtype)


def _rows(kv: Tensor, first_position: int) -> KvRows:
    return KvRows(kv[:, 0], kv[:, 1], first_position)


SCHEMES: Mapping[str, Prefill] = MappingProxyType({"tsp_dense": tsp_dense, "tsp_causal": tsp_causal, "zigzag": zigzag})
"""Prefill functions by the name of their scheme, as used in results."""
