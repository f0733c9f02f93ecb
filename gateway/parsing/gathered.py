"""Collects the pieces of one choice. Pure."""

from dataclasses import dataclass, field

from baton.types import FinishReason, SampledToken
from gateway.parsing.pieces import Arguments, CallBegun, Piece, Reasoning, Text


@dataclass
class GatheredCall:
    """A call of a tool."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Gathered:
    """All pieces of one choice so far, combined."""

    text: str = ""
    reasoning: str = ""
    calls: list[GatheredCall] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)
    finish: FinishReason | None = None

    def add(self, piece: Piece) -> None:
        """Add the next piece."""
        match piece:
            case Text():
                self.text += piece.text
            case Reasoning():
                self.reasoning += piece.text
            case CallBegun():
                self.calls.append(GatheredCall(piece.id, piece.name))
            case Arguments():
                self.calls[piece.number].arguments += piece.text
