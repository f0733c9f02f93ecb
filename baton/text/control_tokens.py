"""Prevents text in a chat from being encoded as control tokens. Only the chat template may begin and end turns with
these tokens.

If a text contains the characters of a control token, `mark` inserts marks between these characters. A mark is a
character that occurs in no text. The template copies the marks with the text. `cut` splits the rendered chat at the
marks. Each part is encoded separately, and no part contains the characters of the token. A chat without such texts has
one part. Pure; any thread.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken

MARK = "\ufdd0"
"""Noncharacter of Unicode, which is not meant for interchange. It is removed from texts."""
_CONTENT_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens that begin and end sections of a message. Clients send back answers that contain them, so they are marked only
if they are special tokens."""
_USUAL_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")


class ControlTokens:
    """Control tokens of a model: its special tokens, and other added tokens that its chat template writes."""

    def __init__(self, added: Iterable[AddedToken], template: str) -> None:
        texts = (token.content for token in added if token.special or _is_written(token.content, template))
        self._texts = sorted(text for text in texts if len(text) > 1 and not text.isspace())
        self._beginnings = sorted({text[:2] for text in self._texts})

    def mark(self, value: Any) -> Any:
        """Return a text with marks inside its control tokens. If `value` is a list or mapping, return a copy in which
        all texts are marked."""
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(each) for each in value]
        return value

    def is_part(self, role: str) -> bool:
        """Return whether an unusual role is part of a control token. A template may write the rest of the token around
        the role."""
        return role not in _USUAL_ROLES and any(role in text for text in self._texts)

    def _marked(self, text: str) -> str:
        text = text.replace(MARK, "")
        if any(beginning in text for beginning in self._beginnings):  # avoids the full search for most texts
            for token in self._texts:
                text = text.replace(token, f"{MARK}{MARK.join(token)}{MARK}")
        return text


def cut(text: str) -> list[str]:
    """Return the parts of a rendered chat that must be encoded separately; at least one."""
    return [part for part in text.split(MARK) if part] or [""]


def min_parts(text: str) -> int:
    """Return a lower bound on the number of parts. Takes milliseconds for megabytes of text."""
    return text.count(MARK) // 2  # n characters of a token have n + 1 marks


def _is_written(token: str, template: str) -> bool:
    return token in template and not token.isalnum() and token not in _CONTENT_MARKS
