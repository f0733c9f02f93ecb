"""Pieces of an answer, in the order in which the model writes them. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the model's reasoning before its answer."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """The beginning of a tool call."""

    number: int
    """Number of the call among all calls of the answer, from 0."""
    id: str
    """Id of the call. The tool's answer refers to it."""
    name: str
    """Name of the function that is called."""


@dataclass(frozen=True)
class Arguments:
    """A part of a call's arguments. All parts of one call, joined, are a JSON object."""

    number: int
    text: str


Piece = Text | Reasoning | CallBegun | Arguments


def merged(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the pieces. Successive pieces of the same kind that belong together are merged into one."""
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
