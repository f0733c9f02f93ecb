"""Prompts taken from passages of a text. Each prompt begins with different words. Prompt lengths are adjusted to the
server's tokenizer."""

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from baton.errors import ConfigError, InvalidArgumentError

NOVEL = Path(__file__).with_name("novel.txt.gz")
"""Default text of prompts: Jane Austen's Emma, which is in the public domain."""
TOKENS_PER_WORD = 1.33
"""Mean number of tokens per English word with common tokenizers. Used if the server does not report token counts."""
_BEGINNING = 8
"""Number of words that form the beginning of a passage. No two passages have the same beginning. A block of cached KV
has more words, so passages do not share cached blocks."""
_LOAD_STRIDE = 7919
"""Distance between the texts that a block of a trace gets in two consecutive loads, in entries of the random list of
start positions. Because these texts differ, loads do not share cached blocks."""
_GZIP = b"\x1f\x8b"


def read_words(path: Path) -> list[str]:
    """Return the words of a UTF-8 text file, optionally compressed by gzip. Raises InvalidArgumentError if the file
    cannot be read or is too short for one passage."""
    try:
        data = path.read_bytes()
        words = (gzip.decompress(data) if data.startswith(_GZIP) else data).decode().split()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"--text: {path} cannot be read ({error}): give a text file in UTF-8") from error
    if len(words) <= _BEGINNING:
        raise InvalidArgumentError(f"--text: {path} has only {len(words)} words: give a longer text")
    return words


class Passages:
    """Source of passages from a text, which start at random positions that a seed determines. The text is treated as
    cyclic: after its last word comes its first."""

    def __init__(self, words: Sequence[str], seed: int) -> None:
        self._words = words
        self._starts = np.random.default_rng(seed).permutation(len(words))
        self._at = self._new_starts()
        self.tokens_per_word = TOKENS_PER_WORD
        """Mean number of tokens per word with the server's tokenizer. It is an estimate until `probing.probe` measures
        it."""

    def take(self, num_tokens: int) -> str:
        """Return a passage of about `num_tokens` tokens whose first words differ from those of all earlier passages.
        Raises ConfigError if all passages of the text have been used."""
        start = next(self._at, None)
        if start is None:
            raise ConfigError(
                f"the text of {len(self._words)} words has no new passage left: give a longer --text, or let prompts "
                "come again by --repeat-prompts"
            )
        return self._passage(start, num_tokens)

    def of_block(self, load: int, number: int, num_tokens: int) -> str:
        """Return the text of one block of a trace, with about `num_tokens` tokens. The text is the same for the same
        `load` and `number`, and differs otherwise."""
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
        """Yield start positions whose passages begin differently from all earlier ones."""
        seen = set[tuple[str, ...]]()
        doubled = [*self._words, *self._words[:_BEGINNING]]
        for start in map(int, self._starts):
            beginning = tuple(doubled[start : start + _BEGINNING])
            if beginning not in seen:
                seen.add(beginning)
                yield start
