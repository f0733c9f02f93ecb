"""Separates a model's reasoning, which <think> and </think> mark, from its answer. The text arrives token by token."""

from collections.abc import Iterator

from gateway.parsing.pieces import Piece, Reasoning, Text

BEGIN, END = "<think>", "</think>"


class ReasoningParser:
    """Parser that splits the text of one choice into the reasoning at its beginning, and the answer."""

    def __init__(self, *, is_open: bool) -> None:
        """Make a parser. `is_open` is true if the prompt ends within reasoning. The model's output then begins with
        reasoning, without <think>."""
        self._held = ""  # text that is not decided yet
        self._is_decided = is_open
        self._is_inside = is_open
        self._is_at_start = True  # white space at the beginning of reasoning and answer is left out

    def push(self, text: str) -> Iterator[Piece]:
        """Read the next text. Yield the pieces of output that are ready to be sent to the client."""
        self._held += text
        if not self._is_decided:
            self._begin()
        if self._is_inside:
            yield from self._read_inside()
        if self._is_decided and not self._is_inside:
            answer, self._held = self._held, ""
            yield from self._answer(answer)

    def end(self) -> Iterator[Piece]:
        """Yield the remaining pieces of the output. Must be called after the model's last token."""
        held, self._held = self._held, ""
        if held and self._is_inside:
            yield from self._reasoning(held.rstrip())
        elif held:
            yield Text(held)

    def _begin(self) -> None:
        """Decide whether the text begins with reasoning, once enough of it has arrived."""
        start = self._held.lstrip()
        if start.startswith(BEGIN):
            self._is_decided = self._is_inside = True
            self._held = start[len(BEGIN) :]
        elif not BEGIN.startswith(start):
            self._is_decided, self._is_at_start = True, False  # no reasoning: the text stays as it is

    def _read_inside(self) -> Iterator[Piece]:
        before, found, after = self._held.partition(END)
        if found:
            yield from self._reasoning(before.rstrip())
            self._held, self._is_inside, self._is_at_start = after, False, True
            return
        num_open = next((n for n in range(len(END) - 1, 0, -1) if before.endswith(END[:n])), 0)
        sent = before[: len(before) - num_open].rstrip()
        self._held = before[len(sent) :]
        yield from self._reasoning(sent)

    def _reasoning(self, text: str) -> Iterator[Piece]:
        text = text.lstrip() if self._is_at_start else text
        if text:
            self._is_at_start = False
            yield Reasoning(text)

    def _answer(self, text: str) -> Iterator[Piece]:
        text = text.lstrip() if self._is_at_start else text
        if text:
            self._is_at_start = False
            yield Text(text)
