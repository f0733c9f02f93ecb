"""Converts the tokens of one stream to text, with `baton.text.detokenizer` and `baton.text.stop_strings`.

Used by `generate_workers.engine.rows` on the engine's thread, and by `orchestrator.api.checks` for resumed streams.
"""

from collections.abc import Sequence
from typing import Self

from baton.text.core_tokenizer import CoreTokenizer
from baton.text.stop_strings import StopChecker, StopResult, StopStrings


class TextStream:
    """Converts the token ids of one stream to the text that its client receives. Each sequence in the engine owns one
    object."""

    def __init__(self, tokenizer: CoreTokenizer, stop: StopStrings, prompt_ids: Sequence[int]) -> None:
        """Create a stream. `stop` holds the stop strings, and `prompt_ids` are the tokens before the first pushed
        token."""
        self._detokenizer = tokenizer.detokenizer(prompt_ids)
        self._checker = StopChecker(stop)
        self._num_tokens = 0
        self._min_tokens = stop.min_tokens

    @classmethod
    def rebuild(
        cls, tokenizer: CoreTokenizer, stop: StopStrings, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> Self:
        """Return a stream in the state after `output_ids` were pushed. It is used to continue a stream that was
        interrupted."""
        stream = cls(tokenizer, stop, prompt_ids)
        for token_id in output_ids:
            stream.push(token_id)
        return stream

    def push(self, token_id: int) -> StopResult:
        """Add the next token. Return the text that can be sent, and whether a stop string has ended the stream."""
        self._num_tokens += 1
        return self._check(self._detokenizer.push(token_id))

    def flush(self) -> str:
        """Return the text that is still held back, at the end of the stream. Empty if a stop string has ended the
        stream. Call once."""
        return self._check(self._detokenizer.flush()).text + self._checker.flush()

    def _check(self, text: str) -> StopResult:
        return self._checker.push(text, may_stop=self._num_tokens > self._min_tokens)
