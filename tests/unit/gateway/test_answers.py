"""Lines of a stream are the chunks that they stand for, however they are made."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from baton.results.completion import Choice, Completion, ModelInfo
from baton.text.stop_strings import StopStrings
from baton.text.stream import TextStream
from baton.text.tokenizer import Tokenizer
from baton.types import FinishReason, SampledToken, TokenEvent, TokenLogprob
from gateway.answers import Chats, Completions, Head, Object, Writer
from gateway.bodies import CompletionBody
from gateway.chat_answers import ParsedChats
from gateway.parsing.output import OutputRules
from gateway.reading import Prompt, Reader
from tests.support.models.tiny_tokenizer import ids_of, letter_tokenizer
from tests.support.models.tokenizers import sentencepiece_core, sentencepiece_tokens, write_folder

TEXTS = ("Once", "", ' "quoted" \\ and\n', "\u00e9\u4e16\U0001f600", "\u2028\x00", "text")


def head(echo: str = "", *, has_logprobs: bool = False) -> Head:
    """The head of an answer to two prompts, whose client named it by what frames are cut at."""
    prompts = (Prompt((1, 2), echo), Prompt((3,), echo))
    return Head('cmpl-"text"', 1, 'a "text" model', 2, letter_tokenizer(), prompts, has_logprobs)


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


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("sentencepiece"), sentencepiece_core()))


def bytes_of(char: str) -> list[int]:
    return [sentencepiece_tokens().index(f"<0x{byte:02X}>") for byte in char.encode()]


def scored(token_ids: Sequence[int]) -> tuple[SampledToken, ...]:
    return tuple(SampledToken(token_id, -0.5 - place) for place, token_id in enumerate(token_ids))


def streamed(head: Head, prompt: tuple[SampledToken, ...], tokens: Sequence[SampledToken], stop: str) -> list[Object]:
    """The logprobs and text of each choice of a stream whose choices have the same tokens, by turns."""
    writer, found = Completions(head), [{"text": "", "logprobs": {}} for _ in range(head.num_choices)]
    text = TextStream(head.tokenizer, StopStrings([stop] if stop else []), head.prompts[0].token_ids)
    for index, token in enumerate(tokens):
        pushed = text.push(token.token_id).text
        for choice in range(head.num_choices):
            event = TokenEvent(index, token, pushed, 0, choice=choice, prompt=() if index or choice else prompt)
            for chunk in writer.chunks(0, event):
                (part,) = chunk["choices"]
                gathered: Any = found[part["index"]]
                gathered["text"] += part["text"]
                for name, values in (part["logprobs"] or {}).items():
                    gathered["logprobs"].setdefault(name, []).extend(values)
    return found


LETTERS = "ABCDEFGHIJKLMNOPQRS"


@pytest.mark.parametrize("has_echo", [False, True])
def test_a_stream_s_logprobs_are_those_of_the_whole_answer(sentencepiece: Tokenizer, has_echo: bool) -> None:
    """Each choice has its prompt's logprobs, whose event is the first choice's; offsets count characters of the
    tokens' text, also where characters have several tokens, and where text is held back for a stop string."""
    hello, a, b, c = map(sentencepiece_tokens().index, ("\u2581hello", "a", "b", "c"))
    split = [a, *bytes_of("\U0001f600"), b, *bytes_of("\u65e5"), c, hello]
    for tokenizer, prompt_ids, echo, output_ids, offsets in (
        (sentencepiece, (1, hello), "hello", split, [0, 1, 1, 1, 1, 2, 3, 3, 3, 4, 5]),
        (letter_tokenizer(), ids_of("Answer."), "Answer.", ids_of(LETTERS), list(range(len(LETTERS)))),
    ):
        prompt = scored(prompt_ids) if has_echo else ()
        head = Head("id", 1, "m", 2, tokenizer, (Prompt(prompt_ids, echo if has_echo else ""),), has_logprobs=True)
        tokens = scored(output_ids)
        found = streamed(head, prompt, tokens, "CDEFGHIJKX")
        choices = tuple(Choice(index, tokenizer.decode(output_ids), tokens, None) for index in range(2))
        whole = Completions(head).whole([Completion("id", choices, prompt, "m", 1, True, 2, None, None, 0)])
        assert found == [{name: each[name] for name in ("text", "logprobs")} for each in whole["choices"]]
        start = len(prompt) and len(echo)
        assert found[1]["logprobs"]["text_offset"][len(prompt) :] == [start + each for each in offsets]


HELLO = sentencepiece_tokens().index("\u2581hello")


@pytest.mark.parametrize(
    ("prompt", "echo", "tokens", "offsets"),
    [
        ([1, HELLO], "<s> hello", ["<s>", " hello"], [0, 3]),
        ([HELLO, 2, 1, HELLO], "hello</s><s> hello", [" hello", "</s>", "<s>", " hello"], [0, 5, 9, 12]),
        ("hello", "hello", ["", " hello"], [0, 0]),
        ("hello</s>a<s>", "hello</s>a<s>", ["", " hello", "</s>", "a", "<s>"], [0, 0, 5, 9, 10]),
        ([*bytes_of("\u65e5"), 1], "\u65e5<s>", ["\ufffd"] * 3 + ["<s>"], [0, 0, 0, 1]),
    ],
)
def test_offsets_of_a_prompt_count_the_text_that_is_echoed(
    sentencepiece: Tokenizer, prompt: str | list[int], echo: str, tokens: list[str], offsets: list[int]
) -> None:
    body = CompletionBody(prompt=prompt, echo=True, logprobs=0)
    model = ModelInfo("m", 500, sentencepiece.vocab_size, "float32", False, "layout")
    (read,) = Reader(sentencepiece, model).completion(body).prompts
    head = Head("id", 1, "m", 1, sentencepiece, (read,), has_logprobs=True)
    choice = Choice(0, " hello", scored([HELLO]), None)
    answer = Completion("id", (choice,), scored(read.token_ids), "m", 1, True, 2, None, None, 0)
    (found,) = Completions(head).whole([answer])["choices"]
    assert found["text"] == f"{echo} hello"
    assert found["logprobs"]["tokens"] == [*tokens, " hello"]
    assert found["logprobs"]["text_offset"] == [*offsets, len(echo)]


@pytest.mark.parametrize(
    ("sampled", "top", "expected"),
    [
        (("b", -3.0), (("a", -0.5), ("c", -1.0)), {"a": -0.5, "c": -1.0, "b": -3.0}),
        (("a", -0.5), (("a", -0.5), ("c", -1.0)), {"a": -0.5, "c": -1.0}),
        (("<0xE6>", -0.4), (("<0xE6>", -0.4), ("a", -1.0), ("<0x97>", -5.8)), {"\ufffd": -0.4, "a": -1.0}),
        (("b", -3.0), (), {"b": -3.0}),
    ],
)
def test_the_sampled_token_and_the_likeliest_of_equal_texts_are_told(
    sentencepiece: Tokenizer, sampled: tuple[str, float], top: Any, expected: dict[str, float]
) -> None:
    index = sentencepiece_tokens().index
    likeliest = tuple(TokenLogprob(index(token), logprob) for token, logprob in top)
    event = TokenEvent(0, SampledToken(index(sampled[0]), sampled[1], likeliest), "", 0)
    writer = Completions(Head("id", 1, "m", 1, sentencepiece, (Prompt((1,)),), has_logprobs=True))
    (chunk,) = writer.chunks(0, event)
    assert chunk["choices"][0]["logprobs"]["top_logprobs"] == [expected]
