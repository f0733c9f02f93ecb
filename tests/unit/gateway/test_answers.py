"""Lines of a stream are the chunks that they stand for, however they are made."""

import json
from collections.abc import Iterable, Sequence

import pytest

from baton.types import FinishReason, SampledToken, TokenEvent
from gateway.answers import Chats, Completions, Head, Object, Writer
from gateway.chat_answers import ParsedChats
from gateway.parsing.output import OutputRules

TEXTS = ("Once", "", ' "quoted" \\ and\n', "\u00e9\u4e16\U0001f600", "\u2028\x00", "text")


def head(echo: str = "", *, has_logprobs: bool = False) -> Head:
    """The head of an answer to two prompts, whose client named it by what frames are cut at."""
    return Head('cmpl-"text"', 1, 'a "text" model', 2, lambda token_id: f"<{token_id}>", (echo, echo), has_logprobs)


def events() -> Sequence[tuple[int, TokenEvent]]:
    """Events of two prompts with two choices each, to their ends."""
    tokens = [TokenEvent(index, SampledToken(index, -0.5), text, 0) for index, text in enumerate(TEXTS)]
    end = TokenEvent(len(TEXTS), None, "!", 0, FinishReason.STOP)
    return [
        (prompt, TokenEvent(each.index, each.token, each.text, 0, each.finish, choice=choice))
        for each in [*tokens, end]
        for prompt in range(2)
        for choice in range(2)
    ]


def as_lines(chunks: Iterable[Object]) -> bytes:
    dumped = (json.dumps(each, ensure_ascii=False, separators=(",", ":")) for each in chunks)
    return "".join(f"data: {each}\n\n" for each in dumped).encode()


@pytest.mark.parametrize("kind", [Chats, Completions])
@pytest.mark.parametrize("has_logprobs", [False, True])
@pytest.mark.parametrize("echo", ["", "before"])
def test_lines_are_the_chunks(kind: type[Writer], has_logprobs: bool, echo: str) -> None:
    by_lines, by_chunks = (kind(head(echo, has_logprobs=has_logprobs)) for _ in range(2))
    for prompt, event in events():
        assert by_lines.lines(prompt, event) == as_lines(by_chunks.chunks(prompt, event))


def test_lines_of_parsed_chats_are_the_chunks() -> None:
    by_lines, by_chunks = (ParsedChats(head(), OutputRules()) for _ in range(2))
    for prompt, event in events():
        assert by_lines.lines(prompt, event) == as_lines(by_chunks.chunks(prompt, event))
