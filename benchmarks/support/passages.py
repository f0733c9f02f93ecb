"""Prompts that are passages of novels (tests/data), none of which begins like another."""

import gzip
from pathlib import Path

from baton.text.tokenizer import Tokenizer

_DATA = Path(__file__).parents[2] / "tests" / "data"
_TEXTS = ("emma", "persuasion", "prideprejudice")
_BEGINNING = 16
"""Tokens at the beginning of a prompt, in which it differs from all others: fewer than a block of cached KV has."""


class Passages:
    """Hands out passages one after the other; begins again, a little later in the text, when the novels are read."""

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._token_ids = token_ids
        self._at = 0
        self._beginnings = set[tuple[int, ...]]()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Passages":
        """Read the novels with this tokenizer."""
        texts = (gzip.decompress((_DATA / f"{name}.txt.gz").read_bytes()).decode() for name in _TEXTS)
        return cls(tuple(token for text in texts for token in tokenizer.encode(text)))

    def take(self, num_tokens: int) -> tuple[int, ...]:
        """Return the next passage of `num_tokens` tokens, whose beginning no passage before it has. Raises ValueError
        when the novels have none left."""
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
