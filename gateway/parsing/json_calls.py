"""Parses one tool call, `{"name": ..., "arguments": {...}}`, character by character.

The arguments are passed on while the model writes them, so that a client can stream them. No text is parsed twice.
"""

import json
from enum import Enum, auto

_ARGUMENTS = ("arguments", "parameters")
"""Keys under which models write the arguments of a call."""
_KEYS = ("name", "type", "id", "function", *_ARGUMENTS)
"""Keys that the JSON object of a tool call may have."""
_OPENING, _CLOSING = "{[", "}]"


class NotACallError(ValueError):
    """Raised if the text that was read is ordinary text and not a tool call."""


class _Place(Enum):
    BEFORE = auto()
    """The JSON object has not begun yet."""
    KEY = auto()
    """The next character must begin a key or end the object."""
    COLON = auto()
    VALUE = auto()
    """The next character belongs to the value of a key."""
    OVER = auto()
    """The JSON object has ended."""


class CallReader:
    """Parser of one tool call. Each call needs a new parser."""

    def __init__(self, *, is_strict: bool = False) -> None:
        """Make a parser. If `is_strict` is true, an object with a key that is not in `_KEYS` is not accepted as a
        call."""
        self.name: str | None = None
        """Name of the function; None until it is known."""
        self.has_arguments = False
        """True once the arguments are complete."""
        self._place = _Place.BEFORE
        self._key = ""
        self._span = ""  # of the key or the value, as far as it has been read
        self._depth = 0  # of brackets within the value
        self._is_string = False
        self._is_escaped = False
        self._early = ""  # arguments that came before the name
        self._is_strict = is_strict
        self._is_short = False  # nothing surrounds the arguments

    @classmethod
    def of_arguments(cls, name: str) -> "CallReader":
        """Return a parser for a call whose name was already read. It reads only the arguments."""
        reader = cls()
        reader._is_short = True
        for char in f'{{"name": {json.dumps(name)}, "arguments":':
            reader.push(char)
        return reader

    @property
    def is_over(self) -> bool:
        """True once the call has been read to its end."""
        return self._place is _Place.OVER or (self._is_short and self.has_arguments)

    def push(self, char: str) -> str:
        """Read the next character. Return the part of the arguments that is ready to be sent to the client; it may be
        empty. Raises NotACallError if the text is not a tool call."""
        match self._place:
            case _Place.BEFORE:
                self._expect(char, "{", _Place.KEY)
            case _Place.KEY:
                return self._read_key(char)
            case _Place.COLON:
                self._expect(char, ":", _Place.VALUE)
            case _Place.VALUE:
                return self._read_value(char)
            case _Place.OVER:
                raise AssertionError("the call is over")
        return ""

    def _expect(self, char: str, expected: str, then: _Place) -> None:
        if char == expected:
            self._place, self._span = then, ""
        elif not char.isspace():
            raise NotACallError(f"{char!r} where {expected!r} belongs")

    def _read_key(self, char: str) -> str:
        if self._span:
            self._span += char
            self._follow(char)
            if not self._is_string:
                key = str(_parsed(self._span))
                if self._is_strict and key not in _KEYS:
                    raise NotACallError(f"calls have no {key}")
                self._key = "" if key in _ARGUMENTS and self.has_arguments else key
                self._place = _Place.COLON
        elif char == '"':
            self._span, self._is_string = char, True
        elif char == "}":
            return self._finish()
        elif not (char.isspace() or char == ","):
            raise NotACallError(f"{char!r} where a key belongs")
        return ""

    def _read_value(self, char: str) -> str:
        is_outside = not self._is_string and not self._depth
        if is_outside and (char in ",}" or (char.isspace() and self._span.endswith(tuple('}"]')))):
            found = self._end_value()
            return found + (self._finish() if char == "}" else "")
        if is_outside and char.isspace():
            return ""
        self._span += char
        self._follow(char)
        if self._key in _ARGUMENTS and self._span[0] == "{":
            done = char == "}" and not self._is_string and not self._depth
            self.has_arguments = self.has_arguments or done
            return self._given(char)
        return ""

    def _follow(self, char: str) -> None:
        """Track the state of strings and the depth of brackets."""
        if self._is_escaped:
            self._is_escaped = False
        elif self._is_string:
            self._is_escaped = char == "\\"
            self._is_string = char != '"'
        elif char == '"':
            self._is_string = True
        elif char in _OPENING:
            self._depth += 1
        elif char in _CLOSING:
            self._depth -= 1

    def _end_value(self) -> str:
        """Process a complete value. Return the part of the arguments that can now be passed on."""
        self._place, span, self._span = _Place.KEY, self._span, ""
        if self._key == "name":
            name = _parsed(span)
            if not isinstance(name, str) or not name:
                raise NotACallError(f"{span!r} is not a name")
            if self.name is not None:
                return ""
            self.name, early, self._early = name, self._early, ""
            return early
        if self._key in _ARGUMENTS and span[:1] != "{":
            given = _parsed(span)
            self.has_arguments = True
            return self._given(given if isinstance(given, str) else "{}" if given is None else span)
        return ""

    def _finish(self) -> str:
        self._place = _Place.OVER
        if self.name is None:
            raise NotACallError("a call without a name")
        return "" if self.has_arguments else "{}"

    def _given(self, text: str) -> str:
        if self.name is None:
            self._early += text
            return ""
        return text


def _parsed(span: str) -> object:
    try:
        return json.loads(span)
    except ValueError as error:
        raise NotACallError(f"{span!r} is not valid JSON") from error
