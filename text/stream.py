"""A stream's text: detokenizer and stop strings together (step 8 of a request's way, on the engine's thread)."""

from collections.abc import Sequence
from typing import Self

from text.stop_strings import StopChecker, StopResult, StopStrings
from text.tokenizer import Tokenizer


class TextStream:
    """Turns one stream's token ids into the text that its client may see. Owned by the stream's row."""

    def __init__(self, tokenizer: Tokenizer, stop: StopStrings) -> None:
        """`stop` holds the strings that end the stream and are not part of its text."""
        self._detokenizer = tokenizer.detokenizer()
        self._checker = StopChecker(stop)

    @classmethod
    def rebuild(cls, tokenizer: Tokenizer, stop: StopStrings, output_ids: Sequence[int]) -> Self:
        """The stream as it is after `output_ids`: what it emits next is what the first one would have emitted."""
        stream = cls(tokenizer, stop)
        for token_id in output_ids:
            stream.push(token_id)
        return stream

    def push(self, token_id: int) -> StopResult:
        """Takes the next token; returns the text that became certain, and whether a stop string is complete."""
        return self._checker.push(self._detokenizer.push(token_id))

    def flush(self) -> str:
        """The text still held back, once, at the end of the stream; "" if a stop string ended it."""
        return self._checker.push(self._detokenizer.flush()).text + self._checker.flush()
