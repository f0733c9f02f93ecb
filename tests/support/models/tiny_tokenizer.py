"""A tokenizer whose token i is the i-th printable ASCII character, so that expected tokens are easy to derive.

Its vocabulary is that of `tiny_models.random_decoder()`: 95 characters, then <s> (95) and </s> (96).
"""

import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Core

from baton.sampling_params import StructuredOutput
from baton.text.grammars import Grammar, Grammars
from baton.text.tokenizer import Tokenizer
from tests.support.models.tokenizers import CHAT_TEMPLATE, write_folder

NUM_LETTERS = 95
BOS_ID = 95
EOS_ID = 96
VOCAB_SIZE = 97


def ids_of(text: str) -> tuple[int, ...]:
    """Return the token ids of printable ASCII text, without using the tokenizer."""
    return tuple(ord(letter) - 32 for letter in text)


def text_of(token_ids: "tuple[int, ...] | list[int]") -> str:
    """Return the text of token ids. The two special tokens have no text."""
    return "".join(chr(token_id + 32) for token_id in token_ids if token_id < NUM_LETTERS)


def write_letters(folder: Path, vocab_size: int = VOCAB_SIZE) -> Path:
    """Write the tokenizer's files to a model's folder, and return the folder. Tokens after the letters are words that
    contain their number."""
    vocab = {chr(32 + index): index for index in range(NUM_LETTERS)} | {"<s>": BOS_ID, "</s>": EOS_ID}
    vocab |= {f" {token_id}": token_id for token_id in range(VOCAB_SIZE, vocab_size)}
    core = Core(models.WordLevel(vocab=vocab, unk_token="<s>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])  # the form that grammars support
    core.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return write_folder(folder, core)


def chat_letters(folder: Path) -> Tokenizer:
    """Write the tokenizer with a chat template to the folder, and load it."""
    write_letters(folder)
    write_chat_template(folder)
    return Tokenizer.load(folder)


def write_chat_template(folder: Path) -> None:
    """Add a chat template to a model's folder."""
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


@cache
def letter_tokenizer() -> Tokenizer:
    """Return the tokenizer, loaded in the same way as from any model's folder."""
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.load(write_letters(Path(folder)))


class HeldGrammars(Grammars):
    """Grammars of which none is compiled before `may_end` is set."""

    def __init__(self, load_json: Callable[[], str], eos_token_ids: Sequence[int], **options: Any) -> None:
        super().__init__(load_json, eos_token_ids, **options)
        self.begun = list[StructuredOutput]()
        """Forms whose compilation has begun, in order."""
        self.is_begun, self.may_end = threading.Event(), threading.Event()

    def compile(self, form: StructuredOutput) -> Grammar:
        self.begun.append(form)
        self.is_begun.set()
        assert self.may_end.wait(60)
        return super().compile(form)

    def close(self) -> None:
        self.may_end.set()
        super().close()


def letter_grammars() -> Grammars:
    """Return Grammars for the tokenizer. The caller must close them."""
    return Grammars(letter_tokenizer().to_json, (EOS_ID,))
