"""Predicted times to first token for one prompt on n ranks, for all prefill schemes.

Used by `baton simulate` and benchmarks. Does no I/O. A comparison takes tens of milliseconds, mostly for the search of
chunk lengths.
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
"""Distance in tokens between the prompt lengths for which KVR-P has searched the chunk lengths, as in the KV-Runahead
paper. For other prompt lengths, KVR-P interpolates the chunk lengths."""


@dataclass(frozen=True)
class Comparison:
    """Predicted times to first token in seconds, one for each scheme, for a prompt of `num_tokens` uncached tokens on
    `num_ranks` ranks."""

    num_tokens: int
    num_ranks: int
    single: float
    """Time on one rank, in seconds, with the attention kernel (dense or causal) of the chain's protocol."""
    kvr_e: float
    """Time in seconds of a chain whose ranks get chunks of equal length (KVR-E)."""
    kvr_s: float
    """Time in seconds of a chain whose chunk lengths are found by a search (KVR-S)."""
    kvr_p: float
    """Time in seconds of a chain with interpolated chunk lengths (KVR-P). The search is run for two prompt
    lengths: the nearest multiples of KNOT_SPACING below and above `num_tokens`. The chunk lengths for `num_tokens` are
    interpolated between the two results, even if `num_tokens` is a multiple itself."""
    tsp_dense: float
    tsp_causal: float
    zigzag_ring: float
    bound: float
    """Lower bound in seconds. It assumes that communication takes no time, that attention computes only the causal
    half, and that all ranks have equal work."""
    paper_bound: float
    """Lower bound in seconds by equation 3 of the KV-Runahead paper, which calls it TTFT*(p) for p ranks."""
    chunks: tuple[int, ...]
    """Chunk length of each rank in tokens, as found by the search (KVR-S)."""


def compare(num_tokens: int, num_ranks: int, cost: CostModel, protocol: Protocol, *, cached: int = 0) -> Comparison:
    """Predict the times of all schemes for a prompt of `num_tokens` tokens, preceded by `cached` tokens whose KV is
    cached. Only the times of chains (KVR-E, KVR-S, KVR-P) include the push of KV."""
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
    """Return the smallest number of ranks whose time is at most (1 + `margin`) times the shortest time. Two kinds of
    time are considered: `single` for one rank, and `kvr_s` (searched chunk lengths) for the number of ranks of each
    comparison. All comparisons must be of the same prompt."""
    times = {1: comparisons[0].single} | {each.num_ranks: each.kvr_s for each in comparisons}
    return min(ranks for ranks, ttft_s in times.items() if ttft_s <= min(times.values()) * (1 + margin))


def _lengths(ranges: tuple[TokenRange, ...]) -> tuple[int, ...]:
    return tuple(len(each) for each in ranges)


def even_partition(tokens: TokenRange, num_ranks: int) -> tuple[TokenRange, ...]:
    """Divide `tokens` evenly among the ranks (KVR-E in the KV-Runahead paper). If there is a remainder, each of the
    first ranks gets one more token. Raises InvalidArgumentError if there are no tokens or no ranks."""
    check_partition_request(tokens, num_ranks)
    width = min(num_ranks, len(tokens))
    base, extra = divmod(len(tokens), width)
    return as_ranges([base + (rank < extra) for rank in range(width)], tokens.start)
