"""Parses a model's output for one choice: first reasoning, then text and tool calls."""

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
    """Rules for parsing the output of all choices of a request."""

    format: CallFormat | None = None
    """Format of tool calls. None: the output is not searched for tool calls."""
    names: Collection[str] = ()
    """Names of the functions that the model may call."""
    most_calls: int | None = None
    has_reasoning: bool = False
    """True if the model marks its reasoning with <think> and </think>."""
    is_reasoning_open: bool = False
    """True if the prompt ends within reasoning, so that the output begins with reasoning."""
    markers: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    """Text of special tokens that mark reasoning or tool calls, by token id. The detokenizer produces no text for these
    tokens."""

    @property
    def is_plain(self) -> bool:
        """True if the output is not searched for reasoning or tool calls."""
        return self.format is None and not self.has_reasoning

    def parser(self) -> "OutputParser":
        """Return a new parser for the output of one choice."""
        return OutputParser(self)


PLAIN = OutputRules()


class OutputParser:
    """Parser of one choice's output. The text may arrive in pieces of any length."""

    def __init__(self, rules: OutputRules) -> None:
        self._rules = rules
        self._reasoning = ReasoningParser(is_open=rules.is_reasoning_open) if rules.has_reasoning else None
        self._calls: CallParser | None = None
        if rules.format is not None:
            self._calls = CallParser(rules.format, rules.names, self._make_id, rules.most_calls)

    def push(self, text: str, token_id: int | None = None) -> Iterator[Piece]:
        """Read the text of the next token. Yield the pieces of output that are ready to be sent to the client."""
        if token_id is not None:
            text += self._rules.markers.get(token_id, "")
        if text:
            yield from merged(self._answer([Text(text)] if self._reasoning is None else self._reasoning.push(text)))

    def end(self) -> Iterator[Piece]:
        """Yield the remaining pieces of the output. Must be called after the model's last token."""
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
