"""A tokenizer in which token i is the i-th printable ASCII character: what a test expects can be read off.

Its vocabulary is that of `tiny_models.random_decoder()`: 95 characters, then <s> (95) and </s> (96).
"""

import tempfile
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Core

from baton.text.grammars import Grammars
from baton.text.tokenizer import Tokenizer
from tests.support.models.tokenizers import CHAT_TEMPLATE, write_folder

NUM_LETTERS = 95
BOS_ID = 95
EOS_ID = 96
VOCAB_SIZE = 97


def ids_of(text: str) -> tuple[int, ...]:
    """Token ids of printable ASCII text, without asking the tokenizer."""
    return tuple(ord(letter) - 32 for letter in text)


def text_of(token_ids: "tuple[int, ...] | list[int]") -> str:
    """The text of token ids; the two special tokens have none."""
    return "".join(chr(token_id + 32) for token_id in token_ids if token_id < NUM_LETTERS)


def write_letters(folder: Path, vocab_size: int = VOCAB_SIZE) -> Path:
    """Writes the tokenizer's files into a model's folder; returns the folder. Tokens after the letters' are words that
    say their number."""
    vocab = {chr(32 + index): index for index in range(NUM_LETTERS)} | {"<s>": BOS_ID, "</s>": EOS_ID}
    vocab |= {f" {token_id}": token_id for token_id in range(VOCAB_SIZE, vocab_size)}
    core = Core(models.WordLevel(vocab=vocab, unk_token="<s>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])  # as grammars know decoders
    core.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return write_folder(folder, core)


def chat_letters(folder: Path) -> Tokenizer:
    """The tokenizer with a chat template, loaded from files that are written into the folder."""
    write_letters(folder)
    write_chat_template(folder)
    return Tokenizer.load(folder)


def write_chat_template(folder: Path) -> None:
    """Adds a chat template to a model's folder."""
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


@cache
def letter_tokenizer() -> Tokenizer:
    """The tokenizer, loaded as from any model's folder."""
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.load(write_letters(Path(folder)))


def letter_grammars() -> Grammars:
    """Grammars over the tokenizer; to be closed."""
    return Grammars(letter_tokenizer().to_json, (EOS_ID,))
