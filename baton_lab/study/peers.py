"""Predicted times to first token of alternatives to a chain of ranks: tensor/sequence parallel prefill (TSP), a zigzag
ring, and one process.

In all of them, the ranks get equal parts of the prompt, and every rank has the KV of a cached prefix. With n ranks, an
all-gather is n - 1 ring steps of one message each, which do not overlap with computation. In the zigzag ring, the
message of a step overlaps with the attention of the same step.

Sources: KV-Runahead (Cho, Rastegari, Naik, ICML 2024), sections 3 and 4; for the ring, Context Parallelism for Scalable
Million-Token Inference (arXiv 2411.01783); docs/kv_runahead.md. Does no I/O.
"""

from baton.planning.cost_model import CostModel, Kernel


def single(num_tokens: int, cost: CostModel, kernel: Kernel, *, cached: int = 0) -> float:
    """Return the time to first token on one rank, in seconds. `cached`: number of cached tokens before the `num_tokens`
    tokens of the prompt."""
    pairs = num_tokens * (num_tokens * kernel.own_part + cached)
    return cost.num_layers * _layer(cost, num_tokens, pairs) + cost.head_s


def tsp(num_tokens: int, num_ranks: int, cost: CostModel, kernel: Kernel, *, cached: int = 0) -> float:
    """Return the time to first token in seconds with sequence parallel prefill that all-gathers K and V. With
    Kernel.CAUSAL, the busiest of n ranks computes the fraction (2n - 1) / (2n^2) of the query-key pairs that dense
    attention computes for the whole prompt."""
    chunk = num_tokens / num_ranks
    keys = num_tokens if kernel is Kernel.DENSE else num_tokens - chunk / 2
    layer_s = _layer(cost, chunk, chunk * (keys + cached)) + _all_gather(num_tokens, num_ranks, cost)
    return cost.num_layers * layer_s + cost.head_s


def zigzag_ring(num_tokens: int, num_ranks: int, cost: CostModel, *, cached: int = 0) -> float:
    """Return the time to first token in seconds with ring prefill that passes KV between ranks (ring pass-KV) and
    zigzag chunks. With n ranks, each layer has n equal steps, each of which overlaps with one message."""
    chunk = num_tokens / num_ranks
    step_s = cost.pair_s * chunk * chunk / 2
    message_s = cost.link.seconds(chunk * cost.kv_bytes) if num_ranks > 1 else 0.0
    exposed_s = (num_ranks - 1) * max(message_s - step_s, 0.0)
    layer_s = _layer(cost, chunk, chunk * (num_tokens / 2 + cached)) + exposed_s
    return cost.num_layers * layer_s + cost.head_s


def bound(num_tokens: int, num_ranks: int, cost: CostModel, *, cached: int = 0) -> float:
    """Return an approximate lower bound of the time to first token in seconds. It assumes that communication takes no
    time, that attention kernels are causal, and that all work is divided evenly among `num_ranks` ranks.

    A chain can be slightly faster than this bound, by part of the last layer: earlier ranks stop after they have sent
    the last layer's KV.
    """
    pairs = num_tokens * (num_tokens / 2 + cached)
    layer_s = cost.fixed_s + (cost.linear_s * num_tokens + cost.pair_s * pairs) / num_ranks
    return cost.num_layers * max(layer_s, cost.issue_s) + cost.head_s


def paper_bound(num_tokens: int, num_ranks: int, cost: CostModel) -> float:
    """Return the lower bound of the time to first token by equation 3 of the KV-Runahead paper, in seconds. With p
    ranks it is TTFT(1) / 2 * (1/p + 1/p^2), where TTFT(1) is the time on one rank with dense attention. The paper
    treats all of this time as attention."""
    return single(num_tokens, cost, Kernel.DENSE) / 2 * (1 / num_ranks + 1 / num_ranks**2)


def _layer(cost: CostModel, num_tokens: float, pairs: float) -> float:
    return max(cost.fixed_s + cost.linear_s * num_tokens + cost.pair_s * pairs, cost.issue_s)


def _all_gather(num_tokens: int, num_ranks: int, cost: CostModel) -> float:
    """Return the seconds of an all-gather in one layer: n - 1 ring steps, then a copy that joins the pieces."""
    if num_ranks == 1:
        return 0.0
    return (num_ranks - 1) * cost.link.seconds(num_tokens / num_ranks * cost.kv_bytes) + cost.copy_s * num_tokens
