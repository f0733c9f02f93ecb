"""Division of a prompt among the ranks of a KV-Runahead chain (Cho, Rastegari, Naik, ICML 2024, section 4.2).

A division has one consecutive, non-empty range of tokens for each rank, in rank order. `tokens.start` tokens are
cached. With fewer tokens than ranks, it has one range for each token. Pure.
"""

import itertools
from collections.abc import Sequence

from baton.errors import InvalidArgumentError
from baton.types import TokenRange


def as_ranges(chunks: Sequence[int], start: int) -> tuple[TokenRange, ...]:
    """Return consecutive ranges, the first of which begins at `start`, with the lengths in `chunks`."""
    edges = itertools.pairwise(itertools.accumulate(chunks, initial=start))
    return tuple(TokenRange(*edge) for edge in edges)


def check_partition_request(tokens: TokenRange, num_ranks: int) -> None:
    """Raise InvalidArgumentError for no tokens or no ranks. Used by all functions that divide prompts, so that their
    messages are equal."""
    if not len(tokens):
        raise InvalidArgumentError(f"tokens = [{tokens.start}, {tokens.end}) is empty: at least one is to be computed")
    if num_ranks < 1:
        raise InvalidArgumentError(f"num_ranks = {num_ranks} is out of range: use at least 1")
