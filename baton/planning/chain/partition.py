"""Division of a prompt among the ranks of a KV-Runahead chain (Cho, Rastegari, Naik, ICML 2024, section 4.2).

A division is one consecutive, non-empty range of tokens a rank, in rank order; `tokens.start` tokens are cached. With
fewer tokens than ranks it has one range a token. Pure.
"""

import itertools
from collections.abc import Sequence

from baton.errors import InvalidArgumentError
from baton.types import TokenRange


def even_partition(tokens: TokenRange, num_ranks: int) -> tuple[TokenRange, ...]:
    """Divide `tokens` into chunks of equal length, with the remainder spread over the first ranks (KVR-E). Raises
    InvalidArgumentError for no tokens or no ranks."""
    check_partition_request(tokens, num_ranks)
    width = min(num_ranks, len(tokens))
    base, extra = divmod(len(tokens), width)
    return as_ranges([base + (rank < extra) for rank in range(width)], tokens.start)


def as_ranges(chunks: Sequence[int], start: int) -> tuple[TokenRange, ...]:
    """Return consecutive ranges of these lengths that begin at `start`."""
    edges = itertools.pairwise(itertools.accumulate(chunks, initial=start))
    return tuple(TokenRange(*edge) for edge in edges)


def check_partition_request(tokens: TokenRange, num_ranks: int) -> None:
    """Raise InvalidArgumentError for no tokens or no ranks, with one text for all functions that divide prompts."""
    if not len(tokens):
        raise InvalidArgumentError(f"tokens = [{tokens.start}, {tokens.end}) is empty: at least one is to be computed")
    if num_ranks < 1:
        raise InvalidArgumentError(f"num_ranks = {num_ranks} is out of range: use at least 1")
