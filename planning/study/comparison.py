"""One prompt on n ranks: the predicted times to first token of every scheme, side by side.

Used by `baton simulate` and benchmarks. Pure; some tens of milliseconds a case, most of it the search.
"""

from dataclasses import dataclass

from baton.types import TokenRange
from planning.cost_model import CostModel, Kernel, Protocol
from planning.partition import EvenPartitioner
from planning.partition_table import PredictedPartitioner, build_table
from planning.search import search
from planning.study.peers import bound, paper_bound, single, tsp, zigzag_ring
from planning.wavefront import chain_ttft

KNOT_SPACING = 4096
"""Tokens between the knots that KVR-P interpolates, as in the paper."""


@dataclass(frozen=True)
class Comparison:
    """Seconds to the first token of `num_tokens` uncached tokens on `num_ranks` ranks."""

    num_tokens: int
    num_ranks: int
    single: float
    """One rank, with the protocol's kernel."""
    kvr_e: float
    """Even chunks."""
    kvr_s: float
    """Searched chunks."""
    kvr_p: float
    """Interpolated between the searched neighbours at multiples of KNOT_SPACING, this length itself left out."""
    tsp_dense: float
    tsp_causal: float
    zigzag_ring: float
    bound: float
    """No communication, causal kernels, perfect balance."""
    paper_bound: float
    """TTFT*(p), equation 3 of the paper."""
    chunks: tuple[int, ...]
    """Of KVR-S."""


def compare(num_tokens: int, num_ranks: int, cost: CostModel, protocol: Protocol, *, cached: int = 0) -> Comparison:
    """All schemes for one prompt behind `cached` tokens. Peers leave out the push to a generator."""
    width = min(num_ranks, num_tokens)
    tokens = TokenRange(cached, cached + num_tokens)

    def chain(chunks: tuple[int, ...]) -> float:
        return float(chain_ttft(chunks, cost, protocol, cached=cached))

    searched = search(num_tokens, width, cost, protocol, cached=cached)
    below = (num_tokens - 1) // KNOT_SPACING * KNOT_SPACING
    above = (num_tokens // KNOT_SPACING + 1) * KNOT_SPACING
    table = build_table("", cost, protocol, contexts=[each for each in (below, above) if each], ranks=[width])
    return Comparison(
        num_tokens=num_tokens,
        num_ranks=num_ranks,
        single=single(num_tokens, cost, protocol.kernel, cached=cached),
        kvr_e=chain(_lengths(EvenPartitioner().partition(tokens, width))),
        kvr_s=chain(searched),
        kvr_p=chain(_lengths(PredictedPartitioner(table).partition(tokens, width))),
        tsp_dense=tsp(num_tokens, num_ranks, cost, Kernel.DENSE, cached=cached),
        tsp_causal=tsp(num_tokens, num_ranks, cost, Kernel.CAUSAL, cached=cached),
        zigzag_ring=zigzag_ring(num_tokens, num_ranks, cost, cached=cached),
        bound=bound(num_tokens, num_ranks, cost, cached=cached),
        paper_bound=paper_bound(num_tokens, num_ranks, cost),
        chunks=searched,
    )


def enough_ranks(comparisons: list[Comparison], margin: float) -> int:
    """Of comparisons of one prompt: the fewest ranks, 1 included, whose KVR-S is within `margin` (a fraction) of the
    least."""
    times = {1: comparisons[0].single} | {each.num_ranks: each.kvr_s for each in comparisons}
    return min(ranks for ranks, ttft_s in times.items() if ttft_s <= min(times.values()) * (1 + margin))


def _lengths(ranges: tuple[TokenRange, ...]) -> tuple[int, ...]:
    return tuple(len(each) for each in ranges)
