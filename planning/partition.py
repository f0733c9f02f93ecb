"""How a prompt is divided among the ranks of a KV-Runahead chain (Cho, Rastegari, Naik, ICML 2024, section 4.2).

Called once a job, by `orchestrator.placement.chain_width`. Pure.
"""

from typing import Protocol

from baton.errors import InvalidArgumentError
from baton.types import TokenRange


class Partitioner(Protocol):
    """Divides the uncached tokens of a prompt among the ranks of a chain."""

    def partition(self, tokens: TokenRange, num_ranks: int) -> tuple[TokenRange, ...]:
        """Return one consecutive, non-empty range a rank, in rank order, covering `tokens` exactly.

        `tokens.start` is the number of cached tokens before the chunk of rank 0. Returns fewer ranges than `num_ranks`
        when there are fewer tokens than ranks. Raises InvalidArgumentError for no tokens or no ranks.
        """
        ...


class EvenPartitioner:
    """KVR-E: chunks of equal length, with the remainder spread over the first ranks."""

    def partition(self, tokens: TokenRange, num_ranks: int) -> tuple[TokenRange, ...]:
        check_partition_request(tokens, num_ranks)
        width = min(num_ranks, len(tokens))
        base, extra = divmod(len(tokens), width)
        ranges, start = [], tokens.start
        for rank in range(width):
            end = start + base + (rank < extra)
            ranges.append(TokenRange(start, end))
            start = end
        return tuple(ranges)


def check_partition_request(tokens: TokenRange, num_ranks: int) -> None:
    """Raise InvalidArgumentError for no tokens or no ranks, in the same words for every partitioner."""
    if not len(tokens):
        raise InvalidArgumentError(f"tokens = [{tokens.start}, {tokens.end}) is empty: at least one is to be computed")
    if num_ranks < 1:
        raise InvalidArgumentError(f"num_ranks = {num_ranks} is out of range: use at least 1")
