"""Records which pieces of a sequence's KV have arrived, for `generate_workers.slots`; a piece may be pushed twice.

Holds no KV itself; each object belongs to a single thread.
"""

from bisect import bisect_right

from baton.errors import RangeError
from baton.types import TokenRange


class Coverage:
    """Pieces (layer, token range) that have arrived, of tokens [0, num_tokens) in `num_layers` layers.

    Pieces of one layer never overlap: the i-th covers tokens [starts[i], ends[i]), ascending.
    """

    def __init__(self, num_layers: int, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._starts: list[list[int]] = [[] for _ in range(num_layers)]
        self._ends: list[list[int]] = [[] for _ in range(num_layers)]
        self._num_missing = num_layers * num_tokens

    @property
    def complete(self) -> bool:
        """Return whether every token of every layer has arrived."""
        return self._num_missing == 0

    def add(self, layer: int, tokens: TokenRange) -> bool:
        """Record a piece. Return False if an equal piece was added before.

        Raises RangeError, and records nothing, when the piece is empty, lies outside the sequence's layers or tokens,
        or overlaps an earlier piece without being equal to it.
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
        """Return the first layer in which tokens are missing, and the first missing token range in it; None when
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
