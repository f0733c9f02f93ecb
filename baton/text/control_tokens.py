"""Prevents text in a chat from being encoded as control tokens. Control tokens begin and end the turns of a chat, and
only the chat template may write them.

If a text contains the characters of a control token, `mark` inserts a mark between these characters. The mark is a
character that is not used in texts. The chat template copies the marks with the text. `cut` then splits the rendered
chat at the marks, and each part is encoded separately. No part contains the complete control token. A chat without
characters of control tokens has one part. Pure and thread-safe.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken

MARK = "\ufdd0"
"""Character that `ControlTokens.mark` inserts into control tokens in the texts of a chat. It is a noncharacter of
Unicode, which is not meant for interchange. If a text already contains it, `ControlTokens.mark` removes it first."""
_CONTENT_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens that begin and end sections of a message, such as reasoning. The model writes them in its outputs, and clients
send these outputs back as earlier messages. Therefore such a token may occur in the texts of a chat, unless it is a
special token of the model."""
_USUAL_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")


class ControlTokens:
    """Control tokens of a model: its special tokens, and other added tokens that occur in its chat template."""

    def __init__(self, added: Iterable[AddedToken], template: str) -> None:
        texts = (token.content for token in added if token.special or _is_written(token.content, template))
        self._texts = sorted(text for text in texts if len(text) > 1 and not text.isspace())
        self._beginnings = sorted({text[:2] for text in self._texts})

    def mark(self, value: Any) -> Any:
        """Return a copy of `value` with marks between the characters of control tokens. `value` is a text, or a list or
        mapping in which all texts are marked. Other values are returned unchanged."""
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(each) for each in value]
        return value

    def is_part(self, role: str) -> bool:
        """Return True if the text of `role` occurs in a control token. A chat template could complete the control token
        around such a role. Returns False for the usual roles, such as "user"."""
        return role not in _USUAL_ROLES and any(role in text for text in self._texts)

    def _marked(self, text: str) -> str:
        text = text.replace(MARK, "")
        if any(beginning in text for beginning in self._beginnings):  # avoids the full search for most texts
            for token in self._texts:
                text = text.replace(token, f"{MARK}{MARK.join(token)}{MARK}")
        return text


def cut(text: str) -> list[str]:
    """Split a rendered chat into parts that must be encoded separately. It is split at the marks that
    `ControlTokens.mark` inserted. The result has at least one part."""
    return [part for part in text.split(MARK) if part] or [""]


def min_parts(text: str) -> int:
    """Return a lower bound on the number of parts into which `cut` splits a rendered chat. Takes milliseconds for
    megabytes of text."""
    return text.count(MARK) // 2  # n characters of a token have n + 1 marks


def _is_written(token: str, template: str) -> bool:
    return token in template and not token.isalnum() and token not in _CONTENT_MARKS
