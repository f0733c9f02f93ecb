"""Cuts a stream's text at the first complete stop string: before it, or after it if the request includes it.

Used by `baton.text.stream`, after the detokenizer, in the process that samples the tokens, so that generation stops at
the token that completes a stop string.

The match that is completed first is used. If several are completed by the same character, the longest one is used. Text
that may become part of a match is held back, so that no part of a match is emitted, regardless of how the text is cut
into pieces. Each stop string is matched by Knuth, Morris and Pratt's automaton (1977): a character costs amortized
constant time per stop string, and the longest partial match is the text to hold back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from baton.sampling_params import SamplingParams


@dataclass(frozen=True)
class StopResult:
    """Text that is released by one pushed piece, and whether the stream has stopped."""

    text: str
    stopped: bool


class StopStrings:
    """Stop strings with their matching tables. Immutable: all choices of a request share one object, in any thread."""

    def __init__(self, stop: Sequence[str], min_tokens: int = 0, *, is_included: bool = False) -> None:
        """`stop` holds non-empty strings. Building the tables takes 2 ms for the longest list that a request may have.
        A stop string that is completed within the text of the first `min_tokens` tokens does not end the stream. With
        `is_included`, the text ends after the stop string instead of before it, and no text is held back."""
        assert all(stop), "empty stop string"
        self.min_tokens = min_tokens
        self.is_included = is_included
        self.tables = tuple((pattern, _borders(pattern)) for pattern in dict.fromkeys(stop))
        """Tuples of a distinct stop string and the border lengths of its prefixes. A border is a proper prefix that is
        also a suffix; for each prefix, the length of the longest border is stored."""

    @classmethod
    def of(cls, params: SamplingParams) -> Self:
        """Return the stop strings of a request."""
        return cls(params.stop, params.min_tokens, is_included=params.include_stop_str_in_output)


class _Matcher:
    """Matcher of one stop string. `length` is the length of the longest proper prefix of `pattern` that is a suffix of
    the text so far."""

    def __init__(self, pattern: str, borders: Sequence[int]) -> None:
        self.pattern = pattern
        self.length = 0
        self._borders = borders

    def feed(self, char: str) -> bool:
        """Add one character. Return whether the pattern is complete with this character."""
        while self.length and self.pattern[self.length] != char:
            self.length = self._borders[self.length - 1]
        if self.pattern[self.length] == char:
            self.length += 1
        if self.length < len(self.pattern):
            return False
        self.length = self._borders[-1]
        return True


def _borders(pattern: str) -> tuple[int, ...]:
    """Return for each prefix of `pattern` the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        borders[index] = length
    return tuple(borders)


class StopChecker:
    """Cuts one stream's text at its first stop string. Its state depends on the text only, not on how the text is
    divided into pieces."""

    def __init__(self, stop: StopStrings) -> None:
        """`stop` holds the stream's stop strings. If it has none, no text is held back."""
        self._matchers = [_Matcher(pattern, borders) for pattern, borders in stop.tables]
        self._is_included = stop.is_included
        self._held = ""
        self._stopped = False

    def push(self, text: str, *, may_stop: bool = True) -> StopResult:
        """Add the next text and return the text that may be emitted. After the stop, all text is dropped. Without
        `may_stop`, a stop string that is completed by this text is treated as ordinary text."""
        if self._stopped:
            return StopResult("", True)
        if not self._matchers:
            return StopResult(text, False)
        buffer = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            ending = [len(matcher.pattern) for matcher in self._matchers if matcher.feed(char)]
            if ending and may_stop:
                self._stopped, self._held = True, ""
                return StopResult(buffer[: end if self._is_included else end - max(ending)], True)
        num_held = 0 if self._is_included else max(matcher.length for matcher in self._matchers)
        num_certain = len(buffer) - num_held
        self._held = buffer[num_certain:]
        return StopResult(buffer[:num_certain], False)

    def flush(self) -> str:
        """Return the text that is still held back, at the end of the stream; "" after a stop. Do not call `push`
        afterwards."""
        held, self._held = self._held, ""
        return held
