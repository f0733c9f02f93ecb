"""Search for the partition with the shortest predicted time to first token (KVR-S in KV-Runahead, ICML 2024, section
4.2).

The search starts from several partitions, called seeds. One seed is computed from the costs: it gives all ranks the
same compute time, and ignores communication. Other seeds are suitable for slow links; the best of them are used. Seeds
are improved by moving tokens between ranks while this reduces the predicted time.

A search takes tens of milliseconds, and a whole table takes a second; the grid search of the paper took hours. Even
tens of milliseconds are too long for each request, so results are stored in a table
(`baton.planning.chain.partition_table`). See docs/kv_runahead.md. All functions are pure.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from baton.planning.chain.wavefront import chain_ttft, work_of
from baton.planning.cost_model import CostModel, Kernel, Protocol

Partitions = NDArray[np.float64]
"""Array of N partitions, `[N, n]`: the number of tokens of each of n ranks in each partition."""
Evaluate = Callable[[Partitions, float], NDArray[np.float64]]
"""Function that returns the predicted time in seconds of each of N partitions, `[N]`. The second argument is a limit:
times that are not below it may be returned as infinity."""

_NUM_OTHERS = 2
"""Number of seeds (partitions with which the search starts) that are improved, in addition to the one with equal
compute times: those with the shortest predicted times."""
_COARSE_STEPS = 256
"""Resolution of the first pass of the search. Seeds are improved in steps of at least 1 / _COARSE_STEPS of the prompt.
Then the best result is improved in steps of one token."""
_SAME = 1e-9


def search(
    num_tokens: int,
    num_ranks: int,
    cost: CostModel,
    protocol: Protocol,
    *,
    cached: int = 0,
    resolution: int = 1,
    slack: float = 0.0,
) -> tuple[int, ...]:
    """Return the number of tokens of each rank in the best partition that was found, in rank order. Each rank has at
    least one token. The result is deterministic.

    `cached`: number of cached tokens, which precede the `num_tokens` tokens. `resolution`: boundaries between chunks
    are multiples of this number of tokens. A smaller number is used if the prompt is too short. `slack`: fraction by
    which the result may be slower than the best partition. Of the partitions within this limit, the one nearest to
    equal compute times is returned. The results for neighbouring lengths are therefore similar. Without slack they
    could be very different on a slow link, because the sizes of some chunks then hardly affect the time.
    """
    if num_ranks == 1:
        return (num_tokens,)
    unit = max(1, min(resolution, num_tokens // num_ranks))
    num_units, rest = divmod(num_tokens, unit)
    tail = np.zeros(num_ranks)
    tail[-1] = rest

    def evaluate(units: Partitions, limit_s: float) -> NDArray[np.float64]:
        chunks, times = units * unit + tail, np.full(len(units), math.inf)
        work = work_of(chunks, cost, protocol, cached)
        # A lower bound: each rank computes all its layers, the last one at least until its KV can be sent.
        least = work.project + (cost.num_layers - 1) * np.maximum(work.layer, cost.issue_s)
        if (may := least.max(axis=1) < limit_s).any():
            times[may] = chain_ttft(chunks[may], cost, protocol, cached=cached)
        return times

    ideal = analytic_seed(num_tokens, num_ranks, cost, protocol.kernel, cached=cached)
    seeds = [rounded(ideal, num_units), rounded([1.0] * num_ranks, num_units), *tapered(num_units, num_ranks)]
    others = evaluate(np.array(seeds[1:], dtype=np.float64), math.inf).argsort()[:_NUM_OTHERS]
    starts = [seeds[0], *(seeds[1 + other] for other in others)]
    coarse = max(1, num_units // _COARSE_STEPS)
    found = min((descend(start, evaluate, coarse) for start in starts), key=lambda each: each[1])
    best, best_s = descend(found[0], evaluate)
    longest_s = best_s * (1 + slack + _SAME)

    def imbalance(units: Partitions, limit: float) -> NDArray[np.float64]:
        moved: NDArray[np.float64] = np.abs(units - seeds[0]).sum(axis=1)
        near = moved < limit
        moved[near] = np.where(evaluate(units[near], longest_s) < longest_s, moved[near], math.inf)
        return moved

    best = descend(best, imbalance)[0]
    return (*(chunk * unit for chunk in best[:-1]), best[-1] * unit + rest)


def analytic_seed(
    num_tokens: int, num_ranks: int, cost: CostModel, kernel: Kernel, *, cached: int = 0
) -> tuple[int, ...]:
    """Return the number of tokens of each rank with which all ranks have the same compute time, up to rounding. The
    time of communication is ignored.

    The common time is found by bisection. For a given time, each chunk is the root of a quadratic equation. With s
    tokens before it, a chunk of c tokens takes linear_s * c + pair_s * c * (s + w * c) seconds. w is 1 for the dense
    kernel and 1/2 for the causal kernel.
    """
    weight, a, b = kernel.own_part, cost.linear_s, cost.pair_s

    def chunks_within(limit_s: float) -> list[float]:
        chunks, start = [], float(cached)
        for _ in range(num_ranks):
            linear = a + b * start
            # The root of w b c^2 + linear c = limit, in the form that is exact for b = 0 too.
            chunk = 2 * limit_s / (linear + math.sqrt(linear * linear + 4 * weight * b * limit_s))
            chunks.append(chunk)
            start += chunk
        return chunks

    low, high = 0.0, num_tokens * (a + b * (cached + num_tokens))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(chunks_within(middle)) < num_tokens else (low, middle)
    return rounded(chunks_within(high), num_tokens)


def descend(start: Sequence[int], evaluate: Evaluate, least_step: int = 1) -> tuple[tuple[int, ...], float]:
    """Improve a partition by local search. Return the chunks, and the value that `evaluate` returns for them.

    Each step moves tokens from one rank to another, if this decreases the value. If no move decreases it, the number of
    tokens of a step is halved, down to `least_step`. Pairs of moves are also tried, because often the value decreases
    only if the slowest rank gives tokens to two other ranks at once.
    """
    best = np.array(start, dtype=np.float64)
    best_s = float(evaluate(best[None], math.inf)[0])
    moves = _moves(len(best))
    step = max(least_step, 2 ** max(0, int(best.sum() / 8).bit_length() - 1))
    while step >= least_step:
        candidates = best + step * moves
        candidates = candidates[(candidates >= 1).all(axis=1)]
        times = evaluate(candidates, best_s) if len(candidates) else np.array([math.inf])
        index = int(times.argmin())
        if times[index] < best_s * (1 - 1e-12):
            best, best_s = candidates[index], float(times[index])
        else:
            step //= 2
    return tuple(int(chunk) for chunk in best), best_s


def rounded(chunks: Sequence[float], num_tokens: int) -> tuple[int, ...]:
    """Round `chunks` to integers of at least 1 whose sum is `num_tokens`. The chunks are scaled if their sum differs.

    Every boundary between chunks moves by at most one token, unless a chunk would be empty. `num_tokens` must be at
    least the number of chunks.
    """
    scale = num_tokens / sum(chunks)
    num_chunks = len(chunks)
    ends: list[int] = []
    for index, end in enumerate(itertools.accumulate(chunks)):
        least = (ends[-1] if ends else 0) + 1
        most = num_tokens - (num_chunks - 1 - index)
        ends.append(min(max(round(end * scale), least), most))
    ends[-1] = num_tokens
    return tuple(end - start for start, end in itertools.pairwise([0, *ends]))


def tapered(num_tokens: int, num_ranks: int) -> list[tuple[int, ...]]:
    """Return seeds (partitions with which the search starts) for slow links. In three of them, each rank has 0.5, 2 or
    4 times the tokens of the previous rank. In the fourth, the last rank has nearly all tokens."""
    shapes = [[factor**rank for rank in range(num_ranks)] for factor in (0.5, 2.0, 4.0)]
    first = [1.0] * (num_ranks - 1)
    shapes += [[*first, float(max(num_tokens - num_ranks + 1, 1))]]
    return [rounded(shape, num_tokens) for shape in shapes]


def _moves(num_ranks: int) -> Partitions:
    """Return the moves to try, `[moves, ranks]`: moves of one token from one rank to another, and shifts from all other
    ranks to one rank or the reverse. With up to 4 ranks, pairs of single moves are included."""
    unit = np.eye(num_ranks)
    single = [unit[to] - unit[source] for to, source in itertools.permutations(range(num_ranks), 2)]
    spread = []
    for rank in range(num_ranks):
        others = np.ones(num_ranks) - unit[rank]
        spread += [unit[rank] * (num_ranks - 1) - others, others - unit[rank] * (num_ranks - 1)]
    double = [
        first + second
        for first, second in itertools.combinations(single, 2)
        if num_ranks <= 4 and np.abs(first + second).sum() > 2
    ]
    return np.unique(np.array(single + spread + double), axis=0)
