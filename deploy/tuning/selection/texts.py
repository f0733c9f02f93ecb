"""The texts of `baton evaluate`: natural passages, and passages with a fact at the start and a question about it at the
end.

Sequences are independent samples: texts are assigned to sequences one after another, and each sequence has its own part
of its text. Only the facts are random, with a fixed seed.
"""

import gzip
import itertools
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.errors import InvalidArgumentError
from baton.text.tokenizer import Tokenizer
from deploy.tuning.selection.passages import Passage

_SEED = 0
_TOLD = "\n\nThe password of {name} is {secret}.\n\n"
_ASKED = "\n\nThe password of {name} is"
_ANSWER = " {secret}"
_SYLLABLES = ("bar", "dex", "fim", "gor", "lun", "mir", "pol", "quin", "rax", "tov", "vel", "zan")
_SECRETS = (
    "purple", "violin", "granite", "lobster", "copper", "seventy", "Norway", "Tuesday", "pepper", "diamond", "tiger",
    "winter", "helmet", "pumpkin", "silver", "banana",
)  # fmt: skip


@dataclass(frozen=True)
class Needle:
    """A passage that ends in the answer to a question about a fact in its context."""

    passage: Passage
    num_answer: int
    """Number of tokens of the answer at the end, which can be predicted only from the fact."""


class Texts:
    """Texts, divided into one part for each sequence."""

    def __init__(self, tokenizer: Tokenizer, paths: Sequence[Path], num_rows: int) -> None:
        """Read and divide the texts. Raises InvalidArgumentError if a file is not a text, or if there are more files
        than sequences."""
        if num_rows < len(paths):
            raise InvalidArgumentError(f"--rows {num_rows} is less than the {len(paths)} texts: use a row for each")
        self._tokenizer = tokenizer
        self._num_added = len(tokenizer.encode(""))
        texts = []
        for number, path in enumerate(paths):
            pieces = _equal_parts(_read(path), len(range(number, num_rows, len(paths))))
            texts.append([(path, tokenizer.encode(piece)) for piece in pieces])
        self._parts = [texts[row % len(texts)][row // len(texts)] for row in range(num_rows)]

    def passages(self, num_context: int, num_steps: int) -> list[Passage]:
        """Return the first tokens of each sequence's part of the text as a passage. Raises InvalidArgumentError if a
        part is too short."""
        num_tokens = num_context + num_steps + 1
        return [Passage(tuple(_first(*part, num_tokens)), num_context) for part in self._parts]

    def needles(self, num_context: int, num_steps: int) -> list[Needle]:
        """Return a passage for each sequence. Its context has a fact in the first half, at a different position in each
        sequence. The context is followed by at least `num_steps` tokens of the text, then the question and the answer.
        Raises InvalidArgumentError if a part or a context is too short."""
        facts = _facts(len(self._parts))
        forms = [[self._bare(form.format(**fact)) for form in (_TOLD, _ASKED, _ANSWER)] for fact in facts]
        longest = max(len(asked) + len(answer) for _, asked, answer in forms)
        needles = []
        for row, (part, (told, asked, answer)) in enumerate(zip(self._parts, forms, strict=True)):
            depth = num_context * (row + 1) // (2 * (len(forms) + 1))
            if depth + len(told) > num_context:
                raise InvalidArgumentError(f"--context {num_context} has no room for a fact: use more tokens")
            num_behind = num_steps + 1 + longest - len(asked) - len(answer)
            text = _first(*part, num_context - len(told) + num_behind)
            ids = (*text[:depth], *told, *text[depth:], *asked, *answer)
            needles.append(Needle(Passage(ids, num_context), len(answer)))
        return needles

    def _bare(self, text: str) -> list[int]:
        """Return the tokens of a text that is inserted into another one, without the special tokens that the tokenizer
        adds at the start of a text."""
        return self._tokenizer.encode(text)[self._num_added :]


def _first(path: Path, token_ids: list[int], num_tokens: int) -> list[int]:
    """Return the first tokens of a sequence's part of the text in `path`. Raises InvalidArgumentError if the part is
    too short."""
    if len(token_ids) < num_tokens:
        raise InvalidArgumentError(
            f"--text {path}: a row's part has {len(token_ids)} tokens, and {num_tokens} are read: give"
            " longer texts or more of them, fewer --rows, or a shorter --context"
        )
    return token_ids[:num_tokens]


def _facts(num_facts: int) -> list[dict[str, str]]:
    """Return invented names that occur in no text, each with a secret."""
    rng = random.Random(_SEED)
    names = ["".join(rng.sample(_SYLLABLES, 3)).capitalize() for _ in range(num_facts)]
    return [{"name": name, "secret": rng.choice(_SECRETS)} for name in names]


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
