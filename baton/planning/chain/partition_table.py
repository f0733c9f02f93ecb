"""Table from which the partition of each prompt is interpolated (KVR-P in KV-Runahead, ICML 2024, section 4.2). A
lookup is fast enough for every request.

A table is valid for one cost model. For each number of ranks it contains knots. A knot is a context length, and the
fraction of the prompt that each rank computes at this length. Fractions are interpolated linearly between two knots.
Below the first and above the last knot, the nearest knot is used. All functions are pure.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.planning.chain.partition import as_ranges, check_partition_request
from baton.planning.chain.search import rounded, search
from baton.planning.cost_model import CostModel, Protocol
from baton.types import TokenRange

_KNOT_SLACK = 0.005
"""Fraction by which a knot's partition may be slower than the best partition that was found for the same context
length. With this slack, neighbouring knots get similar partitions (see `search`)."""


@dataclass(frozen=True)
class Knot:
    """Best partition that was found for one context length."""

    num_tokens: int
    fractions: tuple[float, ...]
    """Fraction of the prompt's tokens that each rank computes, in rank order. The fractions sum to 1."""


@dataclass(frozen=True)
class PartitionTable:
    """Table of the best partitions that were found. It maps each number of ranks to knots (a context length with its
    partition), sorted by context length."""

    knots: Mapping[int, tuple[Knot, ...]]

    def __post_init__(self) -> None:
        for num_ranks, knots in self.knots.items():
            assert knots, f"no knots for {num_ranks} ranks"
            ascend = all(left.num_tokens < right.num_tokens for left, right in itertools.pairwise(knots))
            assert ascend, f"num_tokens of the knots for {num_ranks} ranks do not ascend"
            for knot in knots:
                assert len(knot.fractions) == num_ranks, f"{knot} has not one fraction for each of {num_ranks} ranks"
                assert all(fraction > 0 for fraction in knot.fractions), f"{knot} has a rank that computes nothing"
                assert math.isclose(sum(knot.fractions), 1, rel_tol=1e-6), f"fractions of {knot} do not sum to 1"

    def partition(self, tokens: TokenRange, num_ranks: int) -> tuple[TokenRange, ...]:
        """Partition `tokens` into consecutive, non-empty ranges, one for each rank in rank order. If there are fewer
        tokens than ranks, return one range for each token.

        Raises InvalidArgumentError if there are no tokens or no ranks, and ConfigError if the table has no knots for
        this number of ranks.
        """
        check_partition_request(tokens, num_ranks)
        if len(tokens) <= num_ranks:
            return as_ranges([1] * len(tokens), tokens.start)
        if num_ranks == 1:
            return (tokens,)
        return as_ranges(rounded(self.fractions(len(tokens), num_ranks), len(tokens)), tokens.start)

    def fractions(self, num_tokens: int, num_ranks: int) -> tuple[float, ...]:
        """Return the fraction of the prompt for each rank, in rank order, for a prompt of `num_tokens` tokens. The
        fractions are interpolated between the context lengths in the table. Raises ConfigError if the table does not
        contain this number of ranks."""
        knots = self.knots.get(num_ranks)
        if knots is None:
            known = ", ".join(str(ranks) for ranks in sorted(self.knots)) or "none"
            raise ConfigError(f"partition table: no knots for {num_ranks} ranks (it has {known}): search them first")
        at = bisect_left([knot.num_tokens for knot in knots], num_tokens)
        if at == 0 or at == len(knots):
            return knots[min(at, len(knots) - 1)].fractions
        low, high = knots[at - 1], knots[at]
        share = (num_tokens - low.num_tokens) / (high.num_tokens - low.num_tokens)
        return tuple(x + share * (y - x) for x, y in zip(low.fractions, high.fractions, strict=True))


def build_table(cost: CostModel, protocol: Protocol, contexts: Mapping[int, Iterable[int]]) -> PartitionTable:
    """Build a table by searching the best partition for each knot (context length for which a partition is stored).
    `contexts` maps each number of ranks (at least 2) to the context lengths of its knots. Lengths with fewer tokens
    than ranks are skipped."""

    def knot(num_tokens: int, num_ranks: int) -> Knot:
        chunks = search(num_tokens, num_ranks, cost, protocol, slack=_KNOT_SLACK)
        return Knot(num_tokens, tuple(chunk / num_tokens for chunk in chunks))

    knots = {}
    for num_ranks, lengths in contexts.items():
        if num_ranks > 1:
            enough = sorted({length for length in lengths if length >= num_ranks})
            knots[num_ranks] = tuple(knot(length, num_ranks) for length in enough)
    return PartitionTable(knots)
