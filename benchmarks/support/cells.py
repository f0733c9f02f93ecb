"""Cells of a benchmark's grid. Each cell is a load of concurrent streams, optionally joined by a long prompt. Performs
no I/O."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.support.answers import Ask
from benchmarks.support.passages import Passages

_CELL = re.compile(r"(\d+)x(\d+):(\d+)(?:\+(\d+):(\d+)@(\d+(?:\.\d+)?))?")


@dataclass(frozen=True)
class Joining:
    """Prompt that arrives while other streams are running."""

    num_tokens: int
    max_tokens: int
    at_s: float
    """Arrival time, in seconds from the start of the streams."""


@dataclass(frozen=True)
class Cell:
    """One load of a grid: `num_streams` prompts of equal length that are sent at once, optionally joined later by one
    more prompt."""

    num_streams: int
    num_tokens: int
    max_tokens: int
    """Number of output tokens of each stream."""
    joining: Joining | None = None

    @classmethod
    def parse(cls, text: str) -> "Cell":
        """Parse a cell from the text STREAMSxPROMPT:OUTPUT, where PROMPT and OUTPUT are numbers of tokens.
        +PROMPT:OUTPUT@SECONDS can be appended for a prompt that joins later. Raises ValueError if the text is not
        valid, or if an output has fewer than two tokens, because then no time between tokens can be measured."""
        found = _CELL.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{text!r} is not a cell: use STREAMSxPROMPT:OUTPUT, for example 16x205:64 or 8x205:96+4400:16@1"
            )
        streams, tokens, output, *joins = found.groups()
        joining = Joining(int(joins[0]), int(joins[1]), float(joins[2])) if joins[0] else None
        cell = cls(int(streams), int(tokens), int(output), joining)
        if min(cell.num_streams, cell.num_tokens) < 1 or min(ask.max_tokens for ask in cell.sizes) < 2:
            raise ValueError(f"{text!r} has no gaps between tokens: use a stream or more, and outputs of 2 or more")
        return cell

    @property
    def sizes(self) -> Sequence[Joining]:
        """Prompt length, output length and arrival time of all requests, in the order in which they are sent."""
        streams = [Joining(self.num_tokens, self.max_tokens, 0.0)] * self.num_streams
        return [*streams, *([self.joining] if self.joining else [])]

    @property
    def keys(self) -> dict[str, object]:
        """Key-value pairs that identify this cell in the case name of an output row."""
        keys: dict[str, object] = {"tokens": self.num_tokens, "streams": self.num_streams, "output": self.max_tokens}
        return keys if self.joining is None else {**keys, "joining": self.joining.num_tokens}

    def asks(self, passages: Passages) -> list[Ask]:
        """Return the requests of the load. Their prompts are passages that have not been used before."""
        return [Ask(passages.take(each.num_tokens), each.max_tokens, each.at_s) for each in self.sizes]

    def __str__(self) -> str:
        text = f"{self.num_streams}x{self.num_tokens}:{self.max_tokens}"
        late = self.joining
        return text if late is None else f"{text}+{late.num_tokens}:{late.max_tokens}@{late.at_s:g}"


def parse_grid(text: str) -> list[Cell]:
    """Parse cells that are separated by commas (see `Cell.parse`). Raises ValueError if the text is not valid."""
    return [Cell.parse(each) for each in text.split(",")]
