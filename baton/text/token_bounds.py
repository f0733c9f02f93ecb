"""Computes a lower bound on the number of tokens of a text without tokenizing it. Prompts that are too long can be
rejected early with this bound.

Used by `baton.text.tokenizer` for `orchestrator.api.checks`. Each byte of a text belongs to a token, unless the
tokenizer drops or replaces some of the text. Each token has at most as many bytes as the longest token of the
vocabulary. The number of tokens is therefore at least the number of bytes of the text divided by the number of bytes of
the longest token. Byte values that the tokenizer may drop are not counted. If it is not known which bytes the tokenizer
may drop, the bound is 0, and no prompt is rejected. Pure and thread-safe.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Core
from tokenizers import models

_NFC_SHRINKS = 9
"""Maximum factor by which Unicode normalization to NFC reduces the number of UTF-8 bytes of a text. NFC first
decomposes a character, which reduces its bytes by a factor of at most 3 (U+1FEF). It then composes the parts again,
which reduces the bytes by a factor of at most 3 (U+0390). The length of ASCII text does not change."""
_WHITESPACE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
_MORE_WHITESPACE = "\u2028\u2029\u202f\u205f\u3000"
_KEEPING = ("ByteLevel", "Metaspace", "Digits", "Split", "Punctuation", "UnicodeScripts")
"""Types of pre-tokenizers that split a text without dropping characters, unless they are configured to remove
separators."""


@dataclass(frozen=True)
class TokenBound:
    """Computes a lower bound on the number of tokens of a text, for one tokenizer. The tokenizer never drops bytes
    other than those in `silent`."""

    longest_bytes: int
    """Maximum number of bytes of text in one token."""
    silent: bytes
    """Byte values that the tokenizer may drop: bytes that are not in the vocabulary, and whitespace if there is a
    special token that removes the whitespace next to it."""
    shrinks: int
    """Maximum factor by which the tokenizer's normalization reduces the number of bytes of a text that is not ASCII. 1:
    normalization does not reduce the number of bytes."""

    def min_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens of `text`."""
        shrinks = 1 if text.isascii() else self.shrinks
        if shrinks > 1 and self.silent:  # normalization may turn any character into a silent byte
            return 0
        data = text.encode(errors="surrogatepass")
        num_bytes = len(data.translate(None, self.silent)) if self.silent else len(data)
        return -(-num_bytes // (self.longest_bytes * shrinks))


def token_bound(core: Core) -> TokenBound | None:
    """Return an object that computes a lower bound on the number of tokens of a text, for one tokenizer. Return None if
    it is not known which bytes of a text the tokenizer may drop."""
    model, shrinks = core.model, _shrinks(_parts(core.normalizer, "normalizers"))
    cuts = list(_parts(core.pre_tokenizer, "pretokenizers"))
    if not isinstance(model, models.BPE) or shrinks is None or not all(map(_keeps_all, cuts)):
        return None
    vocab = core.get_vocab(with_added_tokens=False)
    if any(cut["type"] == "ByteLevel" for cut in cuts):  # a token has a character for each of its bytes
        silent = bytes(byte for byte, char in enumerate(_byte_chars()) if char not in vocab)
        longest = max(map(len, vocab))
    elif model.byte_fallback and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        silent, longest = b"", max(len(token.encode()) for token in vocab)
    else:
        return None
    added = core.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        silent = bytes({*silent, *(_WHITESPACE + _MORE_WHITESPACE).encode()})
    longest = max(longest, *(len(token.content.encode()) for token in added), 1)
    return TokenBound(longest, silent, shrinks)


def _parts(component: Any, of_sequence: str) -> Iterator[Mapping[str, Any]]:
    """Yield the descriptions of normalizers or pre-tokenizers in the format of tokenizer.json: the description itself,
    or each member's if it is a sequence."""
    if component is None:
        return
    pending = [json.loads(component.__getstate__())]
    while pending:
        part = pending.pop(0)
        if part["type"] == "Sequence":
            pending = [*part[of_sequence], *pending]
        else:
            yield part


def _shrinks(normalizers: Iterator[Mapping[str, Any]]) -> int | None:
    """Return the maximum factor by which the normalizers shorten a text, or None if they may drop some of it."""
    shrinks = 1
    for each in normalizers:
        match each:
            case {"type": "NFC"}:
                shrinks *= _NFC_SHRINKS
            case {"type": "Prepend"}:
                pass
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if len(new) >= len(old.encode()):
                pass
            case _:
                return None
    return shrinks


def _keeps_all(cut: Mapping[str, Any]) -> bool:
    return cut["type"] in _KEEPING and cut.get("behavior") != "Removed"


def _byte_chars() -> list[str]:
    """Return, for each byte value, the character that represents it in byte-level vocabularies."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]
