"""Predicted times to first token of one prompt on n ranks, for all schemes.

Used by `baton simulate` and benchmarks. Pure; a comparison takes tens of milliseconds, most of them for the search.
"""

from dataclasses import dataclass

from baton.planning.chain.partition import as_ranges, check_partition_request
from baton.planning.chain.partition_table import build_table
from baton.planning.chain.search import search
from baton.planning.chain.wavefront import chain_ttft
from baton.planning.cost_model import CostModel, Kernel, Protocol
from baton.types import TokenRange
from baton_lab.study.peers import bound, paper_bound, single, tsp, zigzag_ring

KNOT_SPACING = 4096
"""Distance in tokens of the interpolation points of KVR-P, as in the paper."""


@dataclass(frozen=True)
class Comparison:
    """Predicted seconds to the first token, by scheme, for a prompt of `num_tokens` uncached tokens on `num_ranks`
    ranks."""

    num_tokens: int
    num_ranks: int
    single: float
    """Seconds on one rank, with the attention kernel of the protocol."""
    kvr_e: float
    """Seconds of a chain with even chunks (KVR-E)."""
    kvr_s: float
    """Seconds of a chain with searched chunks (KVR-S)."""
    kvr_p: float
    """Seconds of a chain with interpolated chunks (KVR-P). The chunks are interpolated between the searched chunks of
    the neighbouring multiples of KNOT_SPACING, excluding `num_tokens` itself."""
    tsp_dense: float
    tsp_causal: float
    zigzag_ring: float
    bound: float
    """Lower bound in seconds: no communication, causal kernels, perfect balance."""
    paper_bound: float
    """Lower bound in seconds, TTFT*(p), equation 3 of the KV-Runahead paper."""
    chunks: tuple[int, ...]
    """Chunk lengths that KVR-S found, in tokens."""


def compare(num_tokens: int, num_ranks: int, cost: CostModel, protocol: Protocol, *, cached: int = 0) -> Comparison:
    """Predict the times of all schemes for a prompt of `num_tokens` tokens after `cached` tokens. Only the times of
    chains include the push of KV."""
    width = min(num_ranks, num_tokens)
    tokens = TokenRange(cached, cached + num_tokens)

    def chain(chunks: tuple[int, ...]) -> float:
        return float(chain_ttft(chunks, cost, protocol, cached=cached))

    searched = search(num_tokens, width, cost, protocol, cached=cached)
    below = (num_tokens - 1) // KNOT_SPACING * KNOT_SPACING
    above = (num_tokens // KNOT_SPACING + 1) * KNOT_SPACING
    table = build_table(cost, protocol, {width: [each for each in (below, above) if each]})
    return Comparison(
        num_tokens=num_tokens,
        num_ranks=num_ranks,
        single=single(num_tokens, cost, protocol.kernel, cached=cached),
        kvr_e=chain(_lengths(even_partition(tokens, width))),
        kvr_s=chain(searched),
        kvr_p=chain(_lengths(table.partition(tokens, width))),
        tsp_dense=tsp(num_tokens, num_ranks, cost, Kernel.DENSE, cached=cached),
        tsp_causal=tsp(num_tokens, num_ranks, cost, Kernel.CAUSAL, cached=cached),
        zigzag_ring=zigzag_ring(num_tokens, num_ranks, cost, cached=cached),
        bound=bound(num_tokens, num_ranks, cost, cached=cached),
        paper_bound=paper_bound(num_tokens, num_ranks, cost),
        chunks=searched,
    )


def enough_ranks(comparisons: list[Comparison], margin: float) -> int:
    """Return the smallest number of ranks, including 1, whose time is at most (1 + margin) times the shortest.
    `comparisons`: one prompt with different numbers of ranks; KVR-S times are used."""
    times = {1: comparisons[0].single} | {each.num_ranks: each.kvr_s for each in comparisons}
    return min(ranks for ranks, ttft_s in times.items() if ttft_s <= min(times.values()) * (1 + margin))


def _lengths(ranges: tuple[TokenRange, ...]) -> tuple[int, ...]:
    return tuple(len(each) for each in ranges)


def even_partition(tokens: TokenRange, num_ranks: int) -> tuple[TokenRange, ...]:
    """Divide `tokens` into chunks of equal length (KVR-E); the first ranks get one more token each if there is a
    remainder. Raises InvalidArgumentError for no tokens or no ranks."""
    check_partition_request(tokens, num_ranks)
    width = min(num_ranks, len(tokens))
    base, extra = divmod(len(tokens), width)
    return as_ranges([base + (rank < extra) for rank in range(width)], tokens.start)
