"""Turns a stream's token ids into text, one at a time, and returns only text that later tokens cannot change.

Used by `baton.text.stream`, on the generation engine's thread, with one Detokenizer per stream. A Detokenizer's state
depends on the token ids alone.

A character may be split over tokens: the text of an unfinished character ends in U+FFFD until the next token completes
it. So trailing U+FFFD are held back. The text of a token may depend on the token before it (a leading space is dropped
at the start of a text). So new tokens are decoded together with the tokens that made the last returned text, at first
with the prompt's last tokens, and the difference is the new text. Nothing else of the tokenizer's decoder is relied on.
"""

from collections.abc import Callable, Sequence
from itertools import islice

_BROKEN = "\ufffd"
_MAX_PENDING_TOKENS = 32
_TAIL_TOKENS = 4
"""Number of last pending tokens that `_cut` keeps. An unfinished character has fewer tokens, so only broken characters
are split. A whole character has at most this number, so this number of a prompt's tokens spells its last character."""


def text_after(
    decode: Callable[[Sequence[int]], str], context_ids: Sequence[int], context: str, ids: Sequence[int]
) -> str:
    """Return the text of `ids` where they follow `context_ids`, whose text is `context`."""
    text = decode([*context_ids, *ids])
    if text.startswith(context):
        return text[len(context) :]
    return decode(ids)  # the new tokens have changed the context's text: a run of byte tokens broke, or was completed


class Detokenizer:
    """Incremental `decode`: the texts of all calls of `push`, followed by that of `flush`, are the text that the pushed
    ids have after the prompt. Without a prompt, that is `decode(ids)`.

    There is one exception. If a run of byte tokens is not valid UTF-8 as a whole, byte-fallback decoders turn all of it
    into U+FFFD, even its valid characters. Valid characters of such a run that a `push` has already returned stay in
    the text. For the same reason a run that spells more than ten U+FFFD in a row may show more of them than `decode`
    would.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        is_silent: Callable[[int], bool],
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """`decode` makes text of token ids and skips the ids for which `is_silent` returns True. `prompt_ids` are the
        tokens before the first pushed one; empty: the pushed tokens begin a text."""
        self._decode = decode
        self._is_silent = is_silent
        self._context_ids: list[int] = []
        self._context = ""
        """The text of `_context_ids`: the prompt's last characters, or whole ones that have been returned."""
        self._pending_ids: list[int] = []
        self._num_sent = 0
        """Number of characters of the pending ids' text that have been returned."""
        self._keep(self._last_character(prompt_ids), [])

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that became certain with it, "" if none did."""
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
        """Return the text still held back, at the end of the stream. A token pushed afterwards starts a new text."""
        text = self._pending_text()[self._num_sent :]
        self._keep([], [])
        return text

    def _last_character(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return the fewest last tokens of a prompt whose text is whole. A context that begins inside a character would
        spoil the byte tokens of the characters after it."""
        audible = (token_id for token_id in reversed(prompt_ids) if not self._is_silent(token_id))
        tail = list(islice(audible, _TAIL_TOKENS))[::-1]
        tails = (tail[-length:] for length in range(1, len(tail) + 1))
        return next((ids for ids in tails if _BROKEN not in self._decode(ids)), tail)

    def _pending_text(self) -> str:
        return text_after(self._decode, self._context_ids, self._context, self._pending_ids)

    def _send(self, fresh: str, end: int) -> str:
        start, self._num_sent = self._num_sent, max(self._num_sent, end)
        return fresh[start : self._num_sent]

    def _keep(self, context_ids: list[int], pending_ids: list[int]) -> None:
        self._context_ids, self._pending_ids = context_ids, pending_ids
        self._context = self._decode(context_ids) if context_ids else ""
        self._num_sent = 0

    def _cut(self, fresh: str) -> str:
        """Return the first pending tokens' text and forget them, which bounds the work on a long run of broken UTF-8. A
        broken character that is cut moves one U+FFFD from the returned text to the kept."""
        tail_ids = self._pending_ids[-_TAIL_TOKENS:]
        num_head = len(fresh) - len(self._decode(tail_ids))
        text = self._send(fresh, num_head)
        num_sent = self._num_sent - num_head
        self._keep([], tail_ids)
        self._num_sent = num_sent
        return text
