"""KVR-P: partitions predicted from a table of searched ones, fast enough to be used for every request.

A table is valid for one cost model. For each number of ranks it holds knots. A knot is a context length with the
fraction of the prompt that each rank computes. Between two knots the fractions are interpolated linearly; outside of
all knots the nearest one is used (KV-Runahead, ICML 2024, section 4.2). Pure.
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
"""Fraction by which a knot's partition may be slower than the best one. The slack makes the partitions of neighbouring
knots similar (`search`)."""


@dataclass(frozen=True)
class Knot:
    """Partition that was found for one context length."""

    num_tokens: int
    fractions: tuple[float, ...]
    """Fractions of the prompt, one for each rank, in rank order; they sum to 1."""


@dataclass(frozen=True)
class PartitionTable:
    """Searched partitions (knots) by number of ranks, each list ascending by context length."""

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
        """Return consecutive, non-empty ranges that cover `tokens`, one for each rank in rank order. With fewer tokens
        than ranks, return one range for each token. Raises InvalidArgumentError for no tokens or no ranks, and
        ConfigError when the table has no knots for this number of ranks."""
        check_partition_request(tokens, num_ranks)
        if len(tokens) <= num_ranks:
            return as_ranges([1] * len(tokens), tokens.start)
        if num_ranks == 1:
            return (tokens,)
        return as_ranges(rounded(self.fractions(len(tokens), num_ranks), len(tokens)), tokens.start)

    def fractions(self, num_tokens: int, num_ranks: int) -> tuple[float, ...]:
        """Return the fractions for `num_tokens`, interpolated between knots. Raises ConfigError when the table has no
        knots for this number of ranks."""
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
    """Search the knots of a table. `contexts` holds context lengths for each number of ranks above 1. Lengths with
    fewer tokens than ranks are skipped."""

    def knot(num_tokens: int, num_ranks: int) -> Knot:
        chunks = search(num_tokens, num_ranks, cost, protocol, slack=_KNOT_SLACK)
        return Knot(num_tokens, tuple(chunk / num_tokens for chunk in chunks))

    knots = {}
    for num_ranks, lengths in contexts.items():
        if num_ranks > 1:
            enough = sorted({length for length in lengths if length >= num_ranks})
            knots[num_ranks] = tuple(knot(length, num_ranks) for length in enough)
    return PartitionTable(knots)
