"""Pieces of a model's output (text, reasoning and tool calls), in the order in which the model writes them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """Text of the answer, which is shown to the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the model's reasoning, which comes before the answer."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """Start of a tool call, with its id and function name. The arguments follow as separate pieces."""

    number: int
    """Number of the call among all calls of the choice, counted from 0."""
    id: str
    """Id of the call. The message with the tool's result refers to this id."""
    name: str
    """Name of the function that is called."""


@dataclass(frozen=True)
class Arguments:
    """Part of a tool call's arguments. All parts of one call, joined, are the text of a JSON object."""

    number: int
    text: str


Piece = Text | Reasoning | CallBegun | Arguments


def merged(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the pieces, with successive pieces of the same kind merged into one. Pieces of arguments are merged only if
    they belong to the same call."""
    last: Piece | None = None
    for piece in pieces:
        joined = None if last is None else _joined(last, piece)
        if joined is None and last is not None:
            yield last
        last = piece if joined is None else joined
    if last is not None:
        yield last


def _joined(last: Piece, piece: Piece) -> Piece | None:
    match last, piece:
        case Text(), Text():
            return Text(last.text + piece.text)
        case Reasoning(), Reasoning():
            return Reasoning(last.text + piece.text)
        case Arguments(), Arguments() if last.number == piece.number:
            return Arguments(last.number, last.text + piece.text)
    return None
