"""Partitions of a prompt among the ranks of a KV-Runahead chain (Cho, Rastegari, Naik, ICML 2024, section 4.2).

A partition has one consecutive, non-empty range of tokens for each rank, in rank order. If there are fewer tokens than
ranks, it has one range for each token. Tokens before `tokens.start` are cached and are not computed. All functions are
pure.
"""

import itertools
from collections.abc import Sequence

from baton.errors import InvalidArgumentError
from baton.types import TokenRange


def as_ranges(chunks: Sequence[int], start: int) -> tuple[TokenRange, ...]:
    """Return consecutive token ranges. The first range begins at `start`, and `chunks` holds the lengths of the
    ranges."""
    edges = itertools.pairwise(itertools.accumulate(chunks, initial=start))
    return tuple(TokenRange(*edge) for edge in edges)


def check_partition_request(tokens: TokenRange, num_ranks: int) -> None:
    """Raise InvalidArgumentError if there are no tokens or no ranks. All functions that partition prompts call this
    function, so that they raise the same messages."""
    if not len(tokens):
        raise InvalidArgumentError(f"tokens = [{tokens.start}, {tokens.end}) is empty: at least one is to be computed")
    if num_ranks < 1:
        raise InvalidArgumentError(f"num_ranks = {num_ranks} is out of range: use at least 1")
