"""Prompts that are passages of novels (tests/data) with different beginnings."""

import gzip
from pathlib import Path

from baton.text.tokenizer import Tokenizer

_DATA = Path(__file__).parents[2] / "tests" / "data"
_TEXTS = ("emma", "persuasion", "prideprejudice")
_BEGINNING = 16
"""Number of tokens at the beginning of a prompt that differ from all other prompts: fewer than in a block of cached
KV."""


class Passages:
    """Returns consecutive passages. At the end of the novels, it continues near the beginning at another offset."""

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._token_ids = token_ids
        self._at = 0
        self._beginnings = set[tuple[int, ...]]()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Passages":
        """Make passages of the novels with this tokenizer."""
        texts = (gzip.decompress((_DATA / f"{name}.txt.gz").read_bytes()).decode() for name in _TEXTS)
        return cls(tuple(token for text in texts for token in tokenizer.encode(text)))

    def take(self, num_tokens: int) -> tuple[int, ...]:
        """Return the next passage of `num_tokens` tokens that begins differently from all earlier passages. Raises
        ValueError when the novels have no such passage left."""
        last = len(self._token_ids) - num_tokens
        for _ in range(max(last + 1, 0)):
            self._at = self._at if self._at <= last else len(self._beginnings) % (last + 1)
            beginning = self._token_ids[self._at : self._at + _BEGINNING]
            if beginning not in self._beginnings:
                start, self._at = self._at, self._at + num_tokens
                self._beginnings.add(beginning)
                return self._token_ids[start : start + num_tokens]
            self._at += 1
        raise ValueError(f"the novels have no new passage of {num_tokens} tokens: measure fewer rounds, or less")
