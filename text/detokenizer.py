"""Token ids to text, one at a time: what a stream can show as soon as it is certain.

Runs where the token is made (the engine's thread); one Detokenizer a stream. Its state follows from the ids alone.

A character may be split over tokens: the text of an unfinished one ends in U+FFFD, and what it will be depends on the
next token. So trailing U+FFFD are held back. How a token is spelled may depend on the token before it (a leading space
is dropped at the start of a text), so new tokens are decoded behind those that made the last text, and the difference
is what is new: the tokenizer's decoder stays a black box.
"""

from collections.abc import Callable, Sequence

_BROKEN = "\ufffd"
_MAX_PENDING_TOKENS = 32
_TAIL_TOKENS = 4
"""More than an unfinished character can have: it is never cut, only ones that are already broken."""


class Detokenizer:
    """Incremental `decode`: all texts of `push`, and then `flush`, make `decode(ids)`.

    One exception: byte-fallback decoders turn a run of byte tokens that is not valid UTF-8 as a whole into U+FFFD
    throughout, even its valid characters. Of those, the ones that a `push` has returned already stand. (For the same
    reason a run that spells more than ten U+FFFD in a row may show more of them.)
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], is_silent: Callable[[int], bool]) -> None:
        """`decode` makes text of ids and skips the ids for which `is_silent` holds."""
        self._decode = decode
        self._is_silent = is_silent
        self._context_ids: list[int] = []
        self._context = ""
        """The text of `_context_ids`: all returned before, whole characters."""
        self._pending_ids: list[int] = []
        self._num_sent = 0
        """Characters of the pending ids' text that have been returned."""

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that became certain, "" if none did."""
        if self._is_silent(token_id):
            return ""
        self._pending_ids.append(token_id)
        fresh = self._pending_text()
        num_certain = len(fresh.rstrip(_BROKEN))
        text = self._send(fresh, num_certain)
        if fresh and num_certain == len(fresh):
            self._keep(self._pending_ids, [])
        elif fresh and len(self._pending_ids) >= _MAX_PENDING_TOKENS:
            text += self._cut(fresh)
        return text

    def flush(self) -> str:
        """The text still held back, at the end of the stream; the next token would start a new text."""
        text = self._pending_text()[self._num_sent :]
        self._keep([], [])
        return text

    def _pending_text(self) -> str:
        text = self._decode(self._context_ids + self._pending_ids)
        if text.startswith(self._context):
            return text[len(self._context) :]
        return self._decode(self._pending_ids)  # a broken run of byte tokens reaches back into what was returned

    def _send(self, fresh: str, end: int) -> str:
        start, self._num_sent = self._num_sent, max(self._num_sent, end)
        return fresh[start : self._num_sent]

    def _keep(self, context_ids: list[int], pending_ids: list[int]) -> None:
        self._context_ids, self._pending_ids = context_ids, pending_ids
        self._context = self._decode(context_ids) if context_ids else ""
        self._num_sent = 0

    def _cut(self, fresh: str) -> str:
        """Bounds the work on a long run of broken UTF-8: forgets its first tokens and returns their text.

        Where that cuts a broken character in two, the tail shows one U+FFFD more, and the head is taken as one shorter.
        """
        tail_ids = self._pending_ids[-_TAIL_TOKENS:]
        num_head = len(fresh) - len(self._decode(tail_ids))
        text = self._send(fresh, num_head)
        num_sent = self._num_sent - num_head
        self._keep([], tail_ids)
        self._num_sent = num_sent
        return text
