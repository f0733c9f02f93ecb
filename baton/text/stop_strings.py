"""Ends the text of a stream at the first complete stop string. The text ends before the stop string, or after it if the
request includes stop strings in the output.

`baton.text.stream` uses this module after the detokenizer, in the process that samples the tokens. Generation therefore
stops at the token that completes a stop string.

The stop string that is completed first counts. If several are completed by the same character, the longest of them
counts. Text that may be the beginning of a stop string is held back. The result does not depend on how the text is
divided into pieces.

Each stop string is matched by the automaton of Knuth, Morris and Pratt (1977). A character takes amortized constant
time for each stop string, and the longest partial match is the text to hold back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from baton.sampling_params import SamplingParams


@dataclass(frozen=True)
class StopResult:
    """Text that can be sent after one piece of text was added, and whether a stop string has ended the stream."""

    text: str
    stopped: bool


class StopStrings:
    """Stop strings of a request, with tables for matching them. Immutable: all choices of the request share one object,
    on any thread."""

    def __init__(self, stop: Sequence[str], min_tokens: int = 0, *, is_included: bool = False) -> None:
        """Create the matching tables for the non-empty strings `stop`. This takes 2 ms for the longest list that a
        request may have.

        Stop strings that are completed within the text of the first `min_tokens` tokens do not end the stream. If
        `is_included` is True, the text ends after the stop string instead of before it, and no text is held back.
        """
        assert all(stop), "empty stop string"
        self.min_tokens = min_tokens
        self.is_included = is_included
        self.tables = tuple((pattern, _borders(pattern)) for pattern in dict.fromkeys(stop))
        """Distinct stop strings, each with the matching table of the Knuth-Morris-Pratt algorithm. The table has one
        entry for each prefix of the stop string: the length of the prefix's longest border. A border is a string
        shorter than the prefix with which the prefix both begins and ends."""

    @classmethod
    def of(cls, params: SamplingParams) -> Self:
        """Return the stop strings that a request's sampling parameters specify."""
        return cls(params.stop, params.min_tokens, is_included=params.include_stop_str_in_output)


class _Matcher:
    """Matcher of one stop string (`pattern`). `length` is the number of characters at the end of the text so far that
    match the beginning of the pattern. It is less than the length of the pattern."""

    def __init__(self, pattern: str, borders: Sequence[int]) -> None:
        self.pattern = pattern
        self.length = 0
        self._borders = borders

    def feed(self, char: str) -> bool:
        """Add one character of the text. Return True if this character completes the pattern."""
        while self.length and self.pattern[self.length] != char:
            self.length = self._borders[self.length - 1]
        if self.pattern[self.length] == char:
            self.length += 1
        if self.length < len(self.pattern):
            return False
        self.length = self._borders[-1]
        return True


def _borders(pattern: str) -> tuple[int, ...]:
    """Return one number for each prefix of `pattern`: the length of the prefix's longest border. A border is a string
    shorter than the prefix with which the prefix both begins and ends."""
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
    """Ends one stream's text at the first stop string. The state depends only on the text, not on how the text is
    divided into pieces."""

    def __init__(self, stop: StopStrings) -> None:
        """Create a checker for the stop strings `stop` of one stream. If there are none, no text is held back."""
        self._matchers = [_Matcher(pattern, borders) for pattern, borders in stop.tables]
        self._is_included = stop.is_included
        self._held = ""
        self._stopped = False

    def push(self, text: str, *, may_stop: bool = True) -> StopResult:
        """Add the next piece of text. Return the text that can be sent to the client, and whether the stream has
        stopped. Text after the stop is dropped. If `may_stop` is False, a stop string that this piece completes does
        not end the stream."""
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
        """Return the text that is still held back, at the end of the stream. Empty if a stop string has ended the
        stream. Do not call `push` afterwards."""
        held, self._held = self._held, ""
        return held
