"""Prompts that are passages of a text, each with a different beginning, in lengths by the server's token count."""

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from baton.errors import ConfigError, InvalidArgumentError

NOVEL = Path(__file__).with_name("novel.txt.gz")
"""The text of prompts where the user names none: Jane Austen's Emma, which is in the public domain."""
TOKENS_PER_WORD = 1.33
"""Tokens of an English word by the tokenizers of today's models, for servers that do not report token counts."""
_BEGINNING = 8
"""Words at the beginning of a passage that no other passage has: fewer than fit in a block of cached KV."""
_LOAD_STRIDE = 7919
"""Number of passages between the blocks of a load and the equal blocks of the load before."""
_GZIP = b"\x1f\x8b"


def read_words(path: Path) -> list[str]:
    """Return the words of a text file in UTF-8, perhaps compressed by gzip. Raises InvalidArgumentError for a file that
    cannot be read, or is too short for one passage."""
    try:
        data = path.read_bytes()
        words = (gzip.decompress(data) if data.startswith(_GZIP) else data).decode().split()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"--text: {path} cannot be read ({error}): give a text file in UTF-8") from error
    if len(words) <= _BEGINNING:
        raise InvalidArgumentError(f"--text: {path} has only {len(words)} words: give a longer text")
    return words


class Passages:
    """Hands out passages of a text in the order of a seed. The text has no end: its first word follows its last."""

    def __init__(self, words: Sequence[str], seed: int) -> None:
        self._words = words
        self._starts = np.random.default_rng(seed).permutation(len(words))
        self._at = self._new_starts()
        self.tokens_per_word = TOKENS_PER_WORD
        """Mean tokens of a word by the server's tokenizer; set once the server has reported a count."""

    def take(self, num_tokens: int) -> str:
        """Return a passage of about `num_tokens` tokens whose beginning differs from those of all passages before it.
        Raises ConfigError when the text has no such passage left."""
        start = next(self._at, None)
        if start is None:
            raise ConfigError(
                f"the text of {len(self._words)} words has no new passage left: give a longer --text, or let prompts "
                "come again by --repeat-prompts"
            )
        return self._passage(start, num_tokens)

    def of_block(self, load: int, number: int, num_tokens: int) -> str:
        """Return the passage of a trace's block: equal for equal load and number, otherwise different."""
        start = int(self._starts[(load * _LOAD_STRIDE + number) % len(self._starts)])
        return f"[{load}.{number}] {self._passage(start, num_tokens)}"

    def _passage(self, start: int, num_tokens: int) -> str:
        num_words = max(1, round(num_tokens / self.tokens_per_word))
        rounds, rest = divmod(start + num_words, len(self._words))
        if not rounds:
            return " ".join(self._words[start:rest])
        whole = [word for _ in range(rounds - 1) for word in self._words]
        return " ".join([*self._words[start:], *whole, *self._words[:rest]])

    def _new_starts(self) -> Iterator[int]:
        """Yield start positions whose passages begin differently from all before."""
        seen = set[tuple[str, ...]]()
        doubled = [*self._words, *self._words[:_BEGINNING]]
        for start in map(int, self._starts):
            beginning = tuple(doubled[start : start + _BEGINNING])
            if beginning not in seen:
                seen.add(beginning)
                yield start
