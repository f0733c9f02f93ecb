"""Records which pieces of a sequence's KV have arrived. Used by `generate_workers.slots`. A piece may be pushed more
than once.

The module stores no KV. Each object belongs to a single thread.
"""

from bisect import bisect_right

from baton.errors import RangeError
from baton.types import TokenRange


class Coverage:
    """Set of the pieces of a sequence's KV that have arrived. A piece is a token range in one layer. The sequence has
    `num_tokens` tokens and `num_layers` layers.

    Pieces of one layer never overlap. In each layer, the i-th piece covers the tokens from starts[i] to ends[i]
    (exclusive), in ascending order.
    """

    def __init__(self, num_layers: int, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._starts: list[list[int]] = [[] for _ in range(num_layers)]
        self._ends: list[list[int]] = [[] for _ in range(num_layers)]
        self._num_missing = num_layers * num_tokens

    @property
    def complete(self) -> bool:
        """Return True if the KV of all tokens in all layers has arrived."""
        return self._num_missing == 0

    def add(self, layer: int, tokens: TokenRange) -> bool:
        """Record a piece that has arrived. Return False if the same piece was recorded before.

        Raises RangeError, without recording anything, if the piece is empty, is outside the sequence's layers or
        tokens, or overlaps an earlier piece without being equal to it.
        """
        self._check_bounds(layer, tokens)
        starts, ends = self._starts[layer], self._ends[layer]
        index = bisect_right(starts, tokens.start)
        if index and starts[index - 1] == tokens.start and ends[index - 1] == tokens.end:
            return False
        for other in range(max(index - 1, 0), min(index + 1, len(starts))):
            if starts[other] < tokens.end and tokens.start < ends[other]:
                raise RangeError(
                    f"tokens [{tokens.start}, {tokens.end}) of layer {layer} overlap the earlier piece "
                    f"[{starts[other]}, {ends[other]}): push the same pieces, or disjoint ones"
                )
        starts.insert(index, tokens.start)
        ends.insert(index, tokens.end)
        self._num_missing -= len(tokens)
        return True

    def first_missing(self) -> tuple[int, TokenRange] | None:
        """Return the first layer with missing tokens, and the first missing token range in this layer. Return None if
        nothing is missing."""
        for layer, (starts, ends) in enumerate(zip(self._starts, self._ends, strict=True)):
            position = 0
            for start, end in zip(starts, ends, strict=True):
                if start > position:
                    return layer, TokenRange(position, start)
                position = end
            if position < self._num_tokens:
                return layer, TokenRange(position, self._num_tokens)
        return None

    def _check_bounds(self, layer: int, tokens: TokenRange) -> None:
        if not 0 <= layer < len(self._starts):
            raise RangeError(f"layer {layer} does not exist: the lease has {len(self._starts)} layers, from 0")
        if not len(tokens):
            raise RangeError(f"tokens [{tokens.start}, {tokens.end}) are none: push ranges of at least one token")
        if tokens.end > self._num_tokens:
            raise RangeError(
                f"tokens [{tokens.start}, {tokens.end}) of layer {layer} lie outside the lease of "
                f"{self._num_tokens} tokens: reserve as many as are pushed"
            )
