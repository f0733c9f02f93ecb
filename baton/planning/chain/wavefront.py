"""Predicted time to first token of a prefill chain, computed exactly by a recursion over ranks and layers.

For a layer, a rank needs only the KV of the same layer from the previous rank, and nothing is sent back. Let a rank
compute a chunk of c tokens, after P cached tokens and s tokens of earlier ranks. Its durations for one layer are

  fixed        fixed time of a layer
  project(c)   query, key and value projections of the chunk
  own, far     attention to the keys of the chunk itself, and to all earlier keys
  rest         all other matrix products
  message      latency + bytes / bandwidth, for a message with the KV of all earlier ranks' tokens

The rank begins layer l at time h[l]:

  q = h[l] + fixed + project(c)                                     KV of the rank's own chunk is computed
  r = time at which the KV of all earlier tokens has arrived: messages are sent in order, and each takes
      latency + bytes / bandwidth
  h[l + 1] = max(q + own, r) + far + rest                           LOCAL_FIRST: own = c c / 2 pairs, far = c (P + s)
  h[l + 1] = max(q, r) + own + far + rest                           OVERLAPPED
  h[l + 1] = max(h[l], t) + message + fixed + project(c) + own + far + rest
                                                                    BLOCKING: t = time at which the previous rank has
                                                                    the KV to send

Each layer takes at least issue_s. `chain_ttft` solves each recursion for all layers and for many partitions at once. It
uses the closed form of y[l + 1] = max(y[l] + A, x[l] + B), which is a running maximum of x[l] - l A.

See KV-Runahead (Cho, Rastegari, Naik, ICML 2024), section 4, and docs/kv_runahead.md. All functions are pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.planning.cost_model import CostModel, Protocol, Receive

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class LayerTimes:
    """Compute times of one layer on each rank, in seconds. Each field is an array `[N, n]` for N partitions among n
    ranks."""

    project: Seconds
    """Seconds until the chunk's KV can be sent: the fixed time of a layer, and the query, key and value projections."""
    own: Seconds
    """Seconds of attention to the keys of the rank's own chunk."""
    far: Seconds
    """Seconds of the part of a layer that needs earlier ranks' KV: attention to the keys of cached tokens and of
    earlier ranks' tokens, and the matrix products that follow attention."""
    copy: Seconds
    """Seconds to copy one layer's KV before it is sent. This is the KV of the rank's own tokens and of all earlier
    ranks' tokens. 0 on the first rank."""
    last_own: Seconds
    """Value of `own` in the last layer. It is less than in other layers if attention is computed only for the last
    query. `last_far` is the value of `far` in the last layer. Both apply only to the last rank of a chain."""
    last_far: Seconds

    @property
    def layer(self) -> Seconds:
        """Compute time in seconds of any layer except the last one."""
        return self.project + self.own + self.far + self.copy


def work_of(chunks: NDArray[np.float64], cost: CostModel, protocol: Protocol, cached: int | Seconds) -> LayerTimes:
    """Return the compute times of one layer for N partitions among n ranks. `chunks` holds the tokens of each rank,
    `[N, n]`. `cached` is the number of cached tokens: one number for all partitions, or an array `[N, 1]`."""
    earlier = np.cumsum(chunks, axis=1) - chunks
    own_keys = chunks * protocol.kernel.own_part
    rest_s = (1 - cost.project_share) * cost.linear_s
    copy = protocol.num_copies * cost.copy_s * (earlier + chunks)
    copy[:, 0] = 0.0
    queries = np.ones_like(chunks) if protocol.skip_last else chunks
    last_keys = chunks if protocol.skip_last else own_keys
    return LayerTimes(
        project=cost.fixed_s + cost.project_share * cost.linear_s * chunks,
        own=cost.pair_s * chunks * own_keys,
        far=cost.pair_s * chunks * (cached + earlier) + rest_s * chunks,
        copy=copy,
        last_own=cost.pair_s * queries * last_keys,
        last_far=cost.pair_s * queries * (cached + earlier) + rest_s * queries,
    )


def rank_seconds(work: LayerTimes, is_last: NDArray[np.bool_], cost: CostModel, protocol: Protocol) -> Seconds:
    """Return the compute time in seconds of each rank for all layers, without waits and without logits. The result has
    the same shape as the arrays in `work`.

    `is_last` is True for the last rank of each chain, and must be broadcastable to this shape. If `protocol.skip_last`
    is set, the ranks before the last one end as soon as their KV of the last layer can be sent.
    """
    layer = np.maximum(work.layer, cost.issue_s)
    end = np.maximum(work.project + work.last_own + work.last_far + work.copy, cost.issue_s)
    left = work.project + work.copy if protocol.skip_last else layer
    return (cost.num_layers - 1) * layer + np.where(is_last, end, left)


def chain_ttft(
    chunks: Sequence[int] | NDArray[np.float64], cost: CostModel, protocol: Protocol, *, cached: int = 0
) -> Seconds:
    """Return the predicted time to first token in seconds. `chunks` holds the number of tokens of each of n ranks. For
    one partition, its shape is `[n]`, and the result is a scalar. For N partitions, its shape is `[N, n]`, and the
    result has the shape `[N]`.

    `cached` is the number of cached tokens, which precede the tokens in `chunks`. The time ends when the first token is
    sampled. If `cost.push` is set, the time ends only when all KV has reached the generation group, too.
    """
    chunks_Nn = np.atleast_2d(np.asarray(chunks, dtype=np.float64))
    work = work_of(chunks_Nn, cost, protocol, cached)
    num_ranks = chunks_Nn.shape[1]
    arrived: list[Seconds] = []  # arrivals of the earlier chunks at a rank, by message: `[N, L]` each
    pushed = np.zeros(len(chunks_Nn))
    end = pushed
    for rank in range(num_ranks):
        begin_NL, have_NL = _rank(rank, work, arrived, (cost, protocol))
        project = work.project[:, rank, None]
        own_NL = (have_NL if protocol.receive is Receive.BLOCKING else begin_NL) + project
        if cost.push is not None:
            rows = chunks_Nn[:, rank] + (cached if rank == 0 else 0)
            pushed = np.maximum(pushed, _fifo(own_NL, rows * cost.kv_bytes / cost.push.bandwidth)[:, -1])
        if rank < num_ranks - 1:
            ready_NL = own_NL if protocol.cut_through else np.maximum(own_NL, have_NL) + work.copy[:, rank, None]
            arrived = _pass_on(arrived, ready_NL, chunks_Nn[:, : rank + 1], (cost, protocol))
        else:
            end = _finish(begin_NL[:, -1], have_NL[:, -1], work, (cost, protocol))
    end = end + cost.head_s
    if cost.push is not None:
        end = np.maximum(end, pushed) + cost.push.latency_s
    return end if np.ndim(chunks) == 2 else end[0]


def _rank(
    rank: int, work: LayerTimes, arrived: list[Seconds], setting: tuple[CostModel, Protocol]
) -> tuple[Seconds, Seconds]:
    """Return the times at which a rank begins each layer, and at which it has the KV of the earlier tokens: `[N, L]`
    each."""
    cost, protocol = setting
    layers = np.arange(cost.num_layers, dtype=np.float64)
    project, own, far, copy = (each[:, rank] for each in (work.project, work.own, work.far, work.copy))
    whole = np.maximum(project + own + far + copy, cost.issue_s)
    if rank == 0:
        begin_NL = whole[:, None] * layers
        return begin_NL, begin_NL
    came_NL = arrived[-1]
    if protocol.receive is Receive.BLOCKING:
        message = arrived[0]  # here `arrived` holds the message's seconds, and when the KV could be sent
        begin_NL = _scan(came_NL, message + whole, message + whole)
        return begin_NL, np.maximum(begin_NL, came_NL) + message[:, None]
    after = far + copy if protocol.receive is Receive.LOCAL_FIRST else far + own + copy
    begin_NL = _scan(came_NL, whole, after)
    return begin_NL, came_NL


def _pass_on(
    arrived: list[Seconds], ready_NL: Seconds, chunks: NDArray[np.float64], setting: tuple[CostModel, Protocol]
) -> list[Seconds]:
    """Return the times at which a rank's KV reaches the next rank, for each message. With BLOCKING, return the seconds
    of a message and the time at which it could be sent."""
    cost, protocol = setting
    chunk_s = chunks * cost.kv_bytes / cost.link.bandwidth
    if protocol.receive is Receive.BLOCKING:
        return [cost.link.latency_s + chunk_s.sum(axis=1), ready_NL]
    if not protocol.cut_through:
        return [_fifo(ready_NL, chunk_s.sum(axis=1)) + cost.link.latency_s]
    # A layer's messages in rank order, own chunk last: message j of layer l is at l * n + j in one FIFO.
    num_messages = chunks.shape[1]
    available = np.stack([*arrived, ready_NL], axis=2).reshape(len(chunks), -1)
    sizes = np.tile(chunk_s, (1, cost.num_layers))
    before = np.cumsum(sizes, axis=1) - sizes
    done = np.maximum.accumulate(available - before, axis=1) + before + sizes + cost.link.latency_s
    split = done.reshape(len(chunks), cost.num_layers, num_messages)
    return [split[:, :, message] for message in range(num_messages)]


def _finish(begin: Seconds, have: Seconds, work: LayerTimes, setting: tuple[CostModel, Protocol]) -> Seconds:
    """Return the time at which the last rank ends the last layer, `[N]`."""
    cost, protocol = setting
    project, own, far, copy = work.project[:, -1], work.last_own[:, -1], work.last_far[:, -1], work.copy[:, -1]
    whole = np.maximum(project + own + far + copy, cost.issue_s)
    if protocol.receive is Receive.BLOCKING:
        return have + whole
    if protocol.receive is Receive.LOCAL_FIRST:
        return np.maximum(begin + whole, have + far + copy)
    return np.maximum(begin + whole, have + own + far + copy)


def _scan(ready_NL: Seconds, own_s: Seconds, after_s: Seconds) -> Seconds:
    """Solve y[l + 1] = max(y[l] + own_s, ready[l] + after_s), with y[0] = 0, for l = 0 to L - 1. Return y, `[N, L]`."""
    steps = np.arange(ready_NL.shape[1], dtype=np.float64) * own_s[:, None]
    out = np.zeros_like(ready_NL)
    out[:, 1:] = ready_NL[:, :-1] + after_s[:, None] - steps[:, 1:]
    return np.maximum.accumulate(out, axis=1) + steps


def _fifo(ready_NL: Seconds, message_s: Seconds) -> Seconds:
    """Return the times at which a link that sends one message per layer has sent each message, without the link's
    latency: `[N, L]`."""
    steps = np.arange(ready_NL.shape[1], dtype=np.float64) * message_s[:, None]
    return np.maximum.accumulate(ready_NL - steps, axis=1) + steps + message_s[:, None]
