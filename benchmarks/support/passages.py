"""Prompts for benchmarks: passages of novels (tests/data), each with a different beginning."""

import gzip
from pathlib import Path

from baton.text.tokenizer import Tokenizer

_DATA = Path(__file__).parents[2] / "tests" / "data"
_TEXTS = ("emma", "persuasion", "prideprejudice")
_BEGINNING = 16
"""Number of tokens at the beginning of each prompt by which prompts differ: no two prompts have the same first tokens.
It is less than the length of a block of the prefix cache, so no prompt reuses cached KV."""


class Passages:
    """Source of consecutive passages of the novels in tests/data. After the last passage, it starts again from the
    beginning of the novels with a different offset, so that passages differ."""

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._token_ids = token_ids
        self._at = 0
        self._beginnings = set[tuple[int, ...]]()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Passages":
        """Return a source of passages of the novels in tests/data, encoded with this tokenizer."""
        texts = (gzip.decompress((_DATA / f"{name}.txt.gz").read_bytes()).decode() for name in _TEXTS)
        return cls(tuple(token for text in texts for token in tokenizer.encode(text)))

    def take(self, num_tokens: int) -> tuple[int, ...]:
        """Return the next passage of `num_tokens` tokens. Its beginning differs from the beginnings of all earlier
        passages. Raises ValueError if the novels contain no further passage of this length with a new beginning."""
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
