"""Stop strings: the text of a stream ends where the first of them is complete.

Runs where the token is made, after the detokenizer, so that generation stops at that very token.

Which match wins: the one that is complete first; of several that are complete at the same character, the one that
starts first (the longest). Text that may become part of a match is held back, so nothing of a match is ever emitted,
however the text is cut into pieces. Each stop string is matched by Knuth, Morris and Pratt's automaton (1977): a
character costs constant time a stop string, and the longest partial match is what must be held.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopResult:
    """What one piece of text lets out, and whether the stream has stopped."""

    text: str
    stopped: bool


class StopStrings:
    """Stop strings with their tables. Immutable: the streams of a request's choices share them, in any thread."""

    def __init__(self, stop: Sequence[str]) -> None:
        """`stop` holds non-empty strings. Takes two milliseconds for the longest that a request may have."""
        assert all(stop), "empty stop string"
        self.tables = tuple((pattern, _borders(pattern)) for pattern in dict.fromkeys(stop))
        """Each string once, and for each of its prefixes the length of its longest border."""


class _Matcher:
    """How long a prefix of `pattern` the text so far ends with."""

    def __init__(self, pattern: str, borders: Sequence[int]) -> None:
        self.pattern = pattern
        self.length = 0
        self._borders = borders

    def feed(self, char: str) -> bool:
        """Takes a character; True if the whole pattern ends here, after which the matcher must not be fed."""
        while self.length and self.pattern[self.length] != char:
            self.length = self._borders[self.length - 1]
        if self.pattern[self.length] == char:
            self.length += 1
        return self.length == len(self.pattern)


def _borders(pattern: str) -> tuple[int, ...]:
    """For each prefix of `pattern`, the length of its longest proper prefix that is also its suffix."""
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
    """Cuts one stream's text at the first stop string. State follows from the text alone, not from its pieces."""

    def __init__(self, stop: StopStrings) -> None:
        """Without stop strings nothing is ever held back."""
        self._matchers = [_Matcher(pattern, borders) for pattern, borders in stop.tables]
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> StopResult:
        """Takes the next text; after the stop, everything is swallowed and `stopped` stays True."""
        if self._stopped:
            return StopResult("", True)
        if not self._matchers:
            return StopResult(text, False)
        buffer = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            ending = [len(matcher.pattern) for matcher in self._matchers if matcher.feed(char)]
            if ending:
                self._stopped, self._held = True, ""
                return StopResult(buffer[: end - max(ending)], True)
        num_certain = len(buffer) - max(matcher.length for matcher in self._matchers)
        self._held = buffer[num_certain:]
        return StopResult(buffer[:num_certain], False)

    def flush(self) -> str:
        """The text held back, at the end of the stream; "" after a stop. Nothing may be pushed afterwards."""
        held, self._held = self._held, ""
        return held
