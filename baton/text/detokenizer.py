"""Converts the token ids of a stream to text, one token at a time. Only text that later tokens cannot change is
returned.

`baton.text.stream` uses one Detokenizer for each stream, on the generation engine's thread. The state of a Detokenizer
depends only on the token ids.

A character may be split over several tokens. Until it is complete, the decoded text ends in U+FFFD. Therefore U+FFFD at
the end of the text is held back.

The text of a token may depend on the previous tokens. For example, a leading space is dropped at the start of a text.
Therefore new tokens are decoded together with context tokens. The context tokens are those of the last returned text,
or at first the prompt's last tokens. The new text is the text after the text of the context. No other assumptions are
made about the tokenizer's decoder.
"""

from collections.abc import Callable, Sequence
from itertools import islice

_BROKEN = "\ufffd"
_MAX_PENDING_TOKENS = 32
_TAIL_TOKENS = 4
"""Maximum number of tokens that form one character. If `_MAX_PENDING_TOKENS` tokens are pending, `_cut` keeps this
number of last tokens, and returns the text of the tokens before them. The cut can therefore split only invalid UTF-8.
The last character of a prompt is always within this number of last tokens."""


def text_after(
    decode: Callable[[Sequence[int]], str], context_ids: Sequence[int], context: str, ids: Sequence[int]
) -> str:
    """Return the text that `ids` add after `context_ids`. `context` is the text of `context_ids`."""
    text = decode([*context_ids, *ids])
    if text.startswith(context):
        return text[len(context) :]
    return decode(ids)  # the new tokens have changed the context's text: a run of byte tokens broke, or was completed


class Detokenizer:
    """Incremental decoder of one stream. The texts that `push` and `flush` return, in order, form the output text: the
    text that the pushed tokens add to the prompt. Without a prompt, the output text equals `decode(ids)` for the ids of
    the pushed tokens.

    There is an exception for tokenizers that write unknown characters as sequences of byte tokens. If such a sequence
    is not valid UTF-8 as a whole, `decode` converts all of it to U+FFFD, including its valid characters. The output
    text keeps the valid characters that `push` has already returned. If `decode` returns more than ten successive
    U+FFFD, the output text may contain more U+FFFD than the result of `decode`.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        is_silent: Callable[[int], bool],
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """Create a detokenizer. `decode` converts token ids to text, and skips the ids for which `is_silent` returns
        True. `prompt_ids` are the tokens before the first pushed token. If there are none, the pushed tokens begin a
        text."""
        self._decode = decode
        self._is_silent = is_silent
        self._context_ids: list[int] = []
        self._context = ""
        """Text of the tokens in `_context_ids`: the prompt's last characters, or complete characters that were already
        returned."""
        self._pending_ids: list[int] = []
        self._num_sent = 0
        """Number of characters of the pending tokens' text that have already been returned."""
        self._keep(self._last_character(prompt_ids), [])

    def push(self, token_id: int) -> str:
        """Add the next token. Return the new text that later tokens cannot change. The text may be empty."""
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
        """Return the text that is still held back, at the end of the stream. A token pushed afterwards starts a new
        text."""
        text = self._pending_text()[self._num_sent :]
        self._keep([], [])
        return text

    def _last_character(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return the shortest sequence of a prompt's last tokens whose text consists of complete characters. If the
        context began inside a character, the byte tokens of the next characters would be decoded wrongly."""
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
        """Remove the first pending tokens and return their text, which limits the work for a long run of broken UTF-8.
        If this splits a broken character, one U+FFFD of the returned text belongs to the text that is kept."""
        tail_ids = self._pending_ids[-_TAIL_TOKENS:]
        num_head = len(fresh) - len(self._decode(tail_ids))
        text = self._send(fresh, num_head)
        num_sent = self._num_sent - num_head
        self._keep([], tail_ids)
        self._num_sent = num_sent
        return text
