"""Finds tool calls in a model's output, token by token. Each choice needs its own parser.

A marker may be split over several tokens. Text that may become a marker is therefore held back until more text has
arrived. If the text after a marker is not a call, it is passed on as text, including the marker.
"""

from collections.abc import Callable, Collection, Iterator
from enum import Enum, auto

from gateway.parsing.call_formats import CallFormat
from gateway.parsing.json_calls import CallReader, NotACallError
from gateway.parsing.pieces import Arguments, CallBegun, Piece, Text

_SEPARATORS = ",;[]"
"""Characters that may separate calls, in addition to white space."""


class _Mode(Enum):
    START = auto()
    """No text has arrived yet. The output may begin with a call without a marker."""
    TEXT = auto()
    BETWEEN = auto()
    """A tool call may begin, because a marker or another call has ended."""
    NAME = auto()
    """The name of the function is being read, in formats that write the name before the arguments."""
    CALL = auto()


class CallParser:
    """Parser that splits the text of one choice into text and tool calls."""

    def __init__(
        self,
        format_: CallFormat,
        names: Collection[str],
        make_id: Callable[[], str],
        most_calls: int | None = None,
    ) -> None:
        """Make a parser. `names` are the names of the available functions. A call without a marker is recognized only
        if it calls one of these functions. `make_id` returns a new call id. If `most_calls` is set, only the first
        `most_calls` calls are passed on."""
        self.num_calls = 0
        self._format = format_
        self._names = names
        self._make_id = make_id
        self._most_calls = most_calls
        self._mode = _Mode.START if format_.is_bare else _Mode.TEXT
        self._held = ""  # text that is not decided yet
        self._raw = ""  # all since the marker, white space before it included, or since the call before
        self._tail = ""  # the part of it that is a closing marker or a name
        self._reader = CallReader()
        self._is_told = False  # whether the call that is being read has begun for the client
        self._is_marked = False
        self._is_after_call = False  # white space that follows calls is left out

    def push(self, text: str) -> Iterator[Piece]:
        """Read the next text. Yield the pieces of output that are ready to be sent to the client."""
        self._held += text
        while self._held:
            if self._mode is _Mode.START and not self._starts():
                return
            if self._mode is _Mode.TEXT:
                yield from self._read_text()
                if self._mode is _Mode.TEXT:
                    return  # the rest may become a marker
            else:
                char, self._held = self._held[0], self._held[1:]
                yield from self._read_char(char)

    def end(self) -> Iterator[Piece]:
        """Yield the remaining pieces of the output. Must be called after the model's last token. A call that ends
        before its name is complete is passed on as text, unless the output is constrained to calls."""
        if self._format.is_all:
            return
        is_marker_alone = self._mode is _Mode.BETWEEN and not self.num_calls and self._raw.strip() == self._format.begin
        if is_marker_alone or self._mode is _Mode.NAME or (self._mode is _Mode.CALL and not self._is_told):
            yield from self._give_back()
        elif self._mode in (_Mode.START, _Mode.TEXT):
            yield from self._text(self._held.rstrip() if self.num_calls else self._held)

    def _starts(self) -> bool:
        """Decide from the first text whether the answer begins with a call, and set the mode. Return whether enough
        text had arrived to decide."""
        start = self._held.lstrip()
        if not start:
            return False
        self._mode = _Mode.BETWEEN if start.startswith("{") or self._format.is_all else _Mode.TEXT
        return True

    def _read_text(self) -> Iterator[Piece]:
        """Yield text up to a marker, or up to the beginning of a possible marker."""
        begin = self._format.begin
        before, found, after = self._held.partition(begin)
        if found:
            text = before.rstrip()
            yield from self._text(text)
            self._mode, self._held, self._tail, self._is_marked = _Mode.BETWEEN, after, "", True
            self._raw = before[len(text) :] + begin
            return
        num_open = next((n for n in range(len(begin) - 1, 0, -1) if before.endswith(begin[:n])), 0)
        sent = before[: len(before) - num_open].rstrip()
        self._held = before[len(sent) :]
        yield from self._text(sent)

    def _read_char(self, char: str) -> Iterator[Piece]:
        self._raw += char
        if self._mode is _Mode.CALL:
            yield from self._read_call(char)
        elif self._mode is _Mode.NAME:
            self._tail += char
            if char == "{":
                yield from self._begin(CallReader.of_arguments(self._named()))
        elif char == "{" and not self._tail:
            yield from self._begin(CallReader(is_strict=not self._is_marked))
        elif self._tail or not (char.isspace() or char in _SEPARATORS):
            self._tail += char
            yield from self._read_tail()
        elif self._is_after_call:
            self._raw = ""

    def _read_tail(self) -> Iterator[Piece]:
        """Process a character between calls. It belongs to the closing marker, to a name, or to ordinary text."""
        end = self._format.end
        if end and self._tail == end:
            self._mode, self._raw = _Mode.TEXT, ""
        elif end and end.startswith(self._tail):
            return
        elif not end and self._is_marked and not self._format.is_bare and self._tail.isidentifier():
            self._mode = _Mode.NAME
        else:
            yield from self._give_back()

    def _named(self) -> str:
        """Return the name before the arguments that begin now, as in `[TOOL_CALLS]name[ARGS]{...}`."""
        return self._tail[:-1].removeprefix(self._format.begin.lstrip("[")).partition("[")[0].strip()

    def _begin(self, reader: CallReader) -> Iterator[Piece]:
        self._mode, self._reader, self._tail, self._is_told = _Mode.CALL, reader, "", False
        yield from self._read_call("{")

    def _read_call(self, char: str) -> Iterator[Piece]:
        reader = self._reader
        try:
            arguments = reader.push(char)
            if reader.name is not None and not self._is_marked and reader.name not in self._names:
                raise NotACallError(f"there is no function {reader.name}")
        except NotACallError:
            yield from self._give_back()
            return
        if reader.name is not None and not self._is_told:
            self._is_told = self._is_after_call = True
            self.num_calls += 1
            yield from self._told(CallBegun(self.num_calls - 1, self._make_id(), reader.name))
        if arguments:
            yield from self._told(Arguments(self.num_calls - 1, arguments))
        if reader.is_over:
            self._mode, self._raw = _Mode.BETWEEN, ""

    def _give_back(self) -> Iterator[Piece]:
        """Yield as text everything that was read since the marker, or since the last call. If the client has already
        got the beginning of a call, the rest of that call is dropped: its arguments are incomplete."""
        raw, is_told = self._raw, self._mode is _Mode.CALL and self._is_told
        self._mode, self._raw, self._tail = _Mode.TEXT, "", ""
        if not is_told:
            yield from self._text(raw)

    def _told(self, piece: CallBegun | Arguments) -> Iterator[Piece]:
        if self._most_calls is None or piece.number < self._most_calls:
            yield piece

    def _text(self, text: str) -> Iterator[Piece]:
        if self._is_after_call:
            text = text.lstrip()
        if text:
            self._is_after_call = False
            yield Text(text)
