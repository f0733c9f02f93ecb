"""Natural texts that `baton prepare` and `baton evaluate` read.

Each sequence reads a different part of a text, so that sequences are independent samples. Sequence i reads text i
modulo the number of texts. All sequences of one text read parts of about equal length.
"""

import gzip
import itertools
import zlib
from collections.abc import Sequence
from pathlib import Path

from baton.errors import InvalidArgumentError
from baton.text.tokenizer import Tokenizer
from deploy.tuning.selection.passages import Passage


class Texts:
    """Texts that are divided into one part for each sequence."""

    def __init__(self, tokenizer: Tokenizer, paths: Sequence[Path], num_rows: int) -> None:
        """Read the text files and divide them among `num_rows` sequences. Raises InvalidArgumentError if a file is not
        a text file, or if there are more files than sequences."""
        if num_rows < len(paths):
            raise InvalidArgumentError(f"--rows {num_rows} is less than the {len(paths)} texts: use a row for each")
        self._tokenizer = tokenizer
        texts = []
        for number, path in enumerate(paths):
            pieces = _equal_parts(_read(path), len(range(number, num_rows, len(paths))))
            texts.append([(path, tokenizer.encode(piece)) for piece in pieces])
        self._parts = [texts[row % len(texts)][row // len(texts)] for row in range(num_rows)]

    def passages(self, num_context: int, num_steps: int) -> list[Passage]:
        """Return one passage for each sequence. A passage begins with the first token of the sequence's part of the
        text. It has a context of `num_context` tokens, and enough further tokens for `num_steps` steps. Raises
        InvalidArgumentError if a part is too short."""
        num_tokens = num_context + num_steps + 1
        return [Passage(tuple(first_tokens(*part, num_tokens)), num_context) for part in self._parts]


def first_tokens(path: Path, token_ids: list[int], num_tokens: int) -> list[int]:
    """Return the first tokens of a sequence's part of the text in `path`. Raises InvalidArgumentError if the part is
    too short."""
    if len(token_ids) < num_tokens:
        raise InvalidArgumentError(
            f"--text {path}: a row's part has {len(token_ids)} tokens, and {num_tokens} are read: give"
            " longer texts or more of them, fewer --rows, or a shorter --context"
        )
    return token_ids[:num_tokens]


def _equal_parts(text: str, num_parts: int) -> list[str]:
    """Divide a text into parts of about equal length. Each part begins at the start of a line."""
    wanted = [len(text) * part // num_parts for part in range(1, num_parts)]
    starts = [0, *(text.find("\n", place) + 1 or len(text) for place in wanted), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(starts)]


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"--text {path} cannot be read as UTF-8 text ({error}): check the file") from error
