"""Parses a model's output for one choice: first reasoning, then text and tool calls. Pure."""

import secrets
import string
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType

from gateway.parsing.call_formats import CallFormat
from gateway.parsing.pieces import Piece, Text, merged
from gateway.parsing.reasoning import ReasoningParser
from gateway.parsing.tool_calls import CallParser

_SHORT_ID = string.ascii_letters + string.digits


@dataclass(frozen=True)
class OutputRules:
    """Rules for parsing the output of a request's choices."""

    format: CallFormat | None = None
    """Format of tool calls; None: no tools are called."""
    names: Collection[str] = ()
    """Names of the available functions."""
    most_calls: int | None = None
    has_reasoning: bool = False
    """True if the model marks reasoning."""
    is_reasoning_open: bool = False
    """True if the prompt ends within reasoning."""
    markers: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    """Text of special tokens that are markers and produce no text when they are detokenized, by token id."""

    @property
    def is_plain(self) -> bool:
        """True if all output is text."""
        return self.format is None and not self.has_reasoning

    def parser(self) -> "OutputParser":
        """Return a new parser, for one choice."""
        return OutputParser(self)


PLAIN = OutputRules()


class OutputParser:
    """Reads one choice's output, in pieces of text of any length."""

    def __init__(self, rules: OutputRules) -> None:
        self._rules = rules
        self._reasoning = ReasoningParser(is_open=rules.is_reasoning_open) if rules.has_reasoning else None
        self._calls: CallParser | None = None
        if rules.format is not None:
            self._calls = CallParser(rules.format, rules.names, self._make_id, rules.most_calls)

    def push(self, text: str, token_id: int | None = None) -> Iterator[Piece]:
        """Read the next token and its text. Yield the pieces that are complete enough to be passed on."""
        if token_id is not None:
            text += self._rules.markers.get(token_id, "")
        if text:
            yield from merged(self._answer([Text(text)] if self._reasoning is None else self._reasoning.push(text)))

    def end(self) -> Iterator[Piece]:
        """Yield the remaining pieces after the model's last token."""
        reasoning = () if self._reasoning is None else self._answer(self._reasoning.end())
        calls = () if self._calls is None else self._calls.end()
        yield from merged(chain(reasoning, calls))

    def _answer(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if isinstance(piece, Text) and self._calls is not None:
                yield from self._calls.push(piece.text)
            else:
                yield piece

    def _make_id(self) -> str:
        assert self._rules.format is not None
        if self._rules.format.has_short_ids:
            return "".join(secrets.choice(_SHORT_ID) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"
