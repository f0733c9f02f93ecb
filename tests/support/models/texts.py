"""Natural text as token ids."""

import gzip
from functools import cache
from pathlib import Path

from baton.text.tokenizer import Tokenizer
from tests.support.folders import DATA

_NOVEL = DATA / "persuasion.txt.gz"


@cache
def novel_ids(folder: Path) -> tuple[int, ...]:
    """Return the token ids of the first part of a novel."""
    text = gzip.decompress(_NOVEL.read_bytes()).decode()
    return tuple(Tokenizer.load(folder).encode(text[:120_000]))


def passage_ids(folder: Path, num_tokens: int, start: int = 0) -> tuple[int, ...]:
    """Return `num_tokens` consecutive tokens of the novel, starting at token 500 + `start`."""
    return novel_ids(folder)[500 + start : 500 + start + num_tokens]
