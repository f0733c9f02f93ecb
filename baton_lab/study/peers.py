"""Predicted times to first token of alternatives to the chain: tensor/sequence parallel, zigzag ring, one process.

All divide the prompt evenly and hold a cached prefix on every rank. An all-gather is n - 1 ring steps of one message
each, which do not overlap with computation. In the zigzag ring, a step's message overlaps with its attention. Sources:
KV-Runahead (Cho, Rastegari, Naik, ICML 2024), sections 3 and 4; for the ring, Context Parallelism for Scalable
Million-Token Inference (arXiv 2411.01783); docs/kv_runahead.md. Pure.
"""

from baton.planning.cost_model import CostModel, Kernel


def single(num_tokens: int, cost: CostModel, kernel: Kernel, *, cached: int = 0) -> float:
    """Return the seconds to the first token on one rank."""
    pairs = num_tokens * (num_tokens * kernel.own_part + cached)
    return cost.num_layers * _layer(cost, num_tokens, pairs) + cost.head_s


def tsp(num_tokens: int, num_ranks: int, cost: CostModel, kernel: Kernel, *, cached: int = 0) -> float:
    """Return the seconds to the first token with sequence parallel prefill that all-gathers K and V. With
    Kernel.CAUSAL, the busiest of n ranks has (2n - 1) / 2n^2 of all query-key pairs of the dense kernel."""
    chunk = num_tokens / num_ranks
    keys = num_tokens if kernel is Kernel.DENSE else num_tokens - chunk / 2
    layer_s = _layer(cost, chunk, chunk * (keys + cached)) + _all_gather(num_tokens, num_ranks, cost)
    return cost.num_layers * layer_s + cost.head_s


def zigzag_ring(num_tokens: int, num_ranks: int, cost: CostModel, *, cached: int = 0) -> float:
    """Return the seconds to the first token with ring pass-KV prefill and zigzag chunks: n equal steps per layer, each
    overlapping with one message."""
    chunk = num_tokens / num_ranks
    step_s = cost.pair_s * chunk * chunk / 2
    message_s = cost.link.seconds(chunk * cost.kv_bytes) if num_ranks > 1 else 0.0
    exposed_s = (num_ranks - 1) * max(message_s - step_s, 0.0)
    layer_s = _layer(cost, chunk, chunk * (num_tokens / 2 + cached)) + exposed_s
    return cost.num_layers * layer_s + cost.head_s


def bound(num_tokens: int, num_ranks: int, cost: CostModel, *, cached: int = 0) -> float:
    """Return an approximate lower bound in seconds: no communication, causal kernels, all work divided by
    `num_ranks`. A chain can be faster by part of the last layer, because earlier ranks stop after they have sent that
    layer's KV."""
    pairs = num_tokens * (num_tokens / 2 + cached)
    layer_s = cost.fixed_s + (cost.linear_s * num_tokens + cost.pair_s * pairs) / num_ranks
    return cost.num_layers * max(layer_s, cost.issue_s) + cost.head_s


def paper_bound(num_tokens: int, num_ranks: int, cost: CostModel) -> float:
    """Return TTFT*(p), equation 3 of the paper: TTFT(1) / 2 * (1/p + 1/p^2), which treats all of a dense rank's time as
    attention."""
    return single(num_tokens, cost, Kernel.DENSE) / 2 * (1 / num_ranks + 1 / num_ranks**2)


def _layer(cost: CostModel, num_tokens: float, pairs: float) -> float:
    return max(cost.fixed_s + cost.linear_s * num_tokens + cost.pair_s * pairs, cost.issue_s)


def _all_gather(num_tokens: int, num_ranks: int, cost: CostModel) -> float:
    """Return the seconds of an all-gather in one layer: n - 1 ring steps, then a copy that joins the pieces."""
    if num_ranks == 1:
        return 0.0
    return (num_ranks - 1) * cost.link.seconds(num_tokens / num_ranks * cost.kv_bytes) + cost.copy_s * num_tokens
