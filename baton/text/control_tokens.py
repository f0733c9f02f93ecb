"""Keeps the texts of a chat from becoming control tokens, with which only the chat template may begin and end turns.

Where a text spells a control token out, `mark` puts a character that no text has between all of the token's characters.
The template writes the marks along with the text. `cut` splits the rendered chat at the marks: each part is encoded
separately, and none of them contains the token. A chat whose texts spell no control token has one part. Pure; any
thread.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken

MARK = "\ufdd0"
"""A noncharacter of Unicode, not meant for interchange; it is removed from texts."""
_CONTENT_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens that begin and end parts of a message. Answers that clients send back contain them, so they are marked only if
they are special tokens."""
_USUAL_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")


class ControlTokens:
    """The control tokens of a model: its special tokens, and further added tokens that its chat template writes."""

    def __init__(self, added: Iterable[AddedToken], template: str) -> None:
        texts = (token.content for token in added if token.special or _is_written(token.content, template))
        self._texts = sorted(text for text in texts if len(text) > 1 and not text.isspace())
        self._beginnings = sorted({text[:2] for text in self._texts})

    def mark(self, value: Any) -> Any:
        """Return a text with marks in its control tokens, or a list or mapping of such, with marks in all its texts."""
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(each) for each in value]
        return value

    def is_part(self, role: str) -> bool:
        """Return whether a role is unusual and part of a control token: a template may write the token's rest around
        it."""
        return role not in _USUAL_ROLES and any(role in text for text in self._texts)

    def _marked(self, text: str) -> str:
        text = text.replace(MARK, "")
        if any(beginning in text for beginning in self._beginnings):  # spares most texts the search for all
            for token in self._texts:
                text = text.replace(token, f"{MARK}{MARK.join(token)}{MARK}")
        return text


def cut(text: str) -> list[str]:
    """Return the parts of a rendered chat that are to be encoded one by one; at least one."""
    return [part for part in text.split(MARK) if part] or [""]


def min_parts(text: str) -> int:
    """Return a lower bound on the number of parts, within milliseconds for megabytes."""
    return text.count(MARK) // 2  # n characters of a token have n + 1 marks


def _is_written(token: str, template: str) -> bool:
    return token in template and not token.isalnum() and token not in _CONTENT_MARKS
