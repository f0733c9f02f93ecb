"""Calls of tools as models write them, cut at any place: the pieces are the same."""

import json
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.chat_answers import Gathered
from gateway.parsing.call_formats import FORMATS, HERMES, LLAMA3, MISTRAL, OBLIGED, SMOLLM2, CallFormat
from gateway.parsing.output import OutputRules
from gateway.parsing.pieces import Arguments, CallBegun, Text

Calls = Sequence[tuple[str, str]]
NAMES = ("f", "g")


def read(format_: CallFormat, parts: Sequence[str], most_calls: int | None = None) -> tuple[str, Calls]:
    """The text and the calls of an output that comes in these parts."""
    parser, found = OutputRules(format_, NAMES, most_calls).parser(), Gathered()
    for part in parts:
        for piece in parser.push(part):
            found.add(piece)
    for piece in parser.end():
        found.add(piece)
    return found.text, [(call.name, call.arguments) for call in found.calls]


def cuts(text: str) -> list[list[str]]:
    """The text as a whole, letter by letter, and in parts of seeded lengths."""
    chosen, cut = random.Random(7), [[text], list(text)]
    for _ in range(20):
        ends = sorted(chosen.sample(range(len(text) + 1), min(6, len(text))))
        cut.append([text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)])
    return cut


CASES: list[tuple[CallFormat, str, str, Calls]] = [
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>', "", [("f", '{"a": "b"}')]),
    (
        HERMES,
        'Wait.\n<tool_call>{"name": "f", "arguments": {"a": "}\\"<"}}</tool_call>\n'
        '<tool_call>{"arguments": {"b": [{}]}, "name": "g"}</tool_call>',
        "Wait.",
        [("f", '{"a": "}\\"<"}'), ("g", '{"b": [{}]}')],
    ),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>\n\nDone', "Done", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    (HERMES, "<tool_call>not at all</tool_call>", "<tool_call>not at all</tool_call>", []),
    (HERMES, '<tool_call>{"na', '<tool_call>{"na', []),
    (HERMES, '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    (HERMES, " no <tool> at all \n", " no <tool> at all \n", []),
    (HERMES, "Use <tool_call> to call.", "Use <tool_call> to call.", []),
    (HERMES, "One\n\n<tool_call>{}</tool_call>\n", "One\n\n<tool_call>{}</tool_call>\n", []),
    (SMOLLM2, "Use <tool_call> to call.", "Use <tool_call> to call.", []),
    (SMOLLM2, '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>', "", [("f", "{}")]),
    (
        SMOLLM2,
        '<tool_call>[\n{"name": "f", "arguments": {"a": 1}},\n{"name": "g", "arguments": {"a": 2}}\n]</tool_call>',
        "",
        [("f", '{"a": 1}'), ("g", '{"a": 2}')],
    ),
    (SMOLLM2, "<tool_call>[]</tool_call>", "", []),
    (LLAMA3, '{"name": "f", "parameters": {"a": "b"}}', "", [("f", '{"a": "b"}')]),
    (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    (
        LLAMA3,
        '{"type": "function", "name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    (LLAMA3, "Use <|python_tag|> to call.", "Use <|python_tag|> to call.", []),
    (LLAMA3, '{"name": "Bob", "id": 3}', '{"name": "Bob", "id": 3}', []),
    (LLAMA3, '{"answer": 42}', '{"answer": 42}', []),
    (LLAMA3, 'As {"name": "f"}', 'As {"name": "f"}', []),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}]', "", [("f", '{"a": [1]}')]),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}, "id": "x"}]',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": {}}[TOOL_CALLS]g{}', "", [("f", '{"a": {}}'), ("g", "{}")]),
    (MISTRAL, '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
    (MISTRAL, "Use\n\n[TOOL_CALLS]", "Use\n\n[TOOL_CALLS]", []),
    (MISTRAL, "See [TOOL] and [this]", "See [TOOL] and [this]", []),
    (OBLIGED, '[\n{\n    "name": "', "", []),
    (OBLIGED, '[{"name": "f", "arguments": {"a": 1}}, {\n    "', "", [("f", '{"a": 1}')]),
    (OBLIGED, '[{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
]


@pytest.mark.parametrize(("format_", "text", "left", "calls"), CASES)
def test_calls_are_found_wherever_the_text_is_cut(format_: CallFormat, text: str, left: str, calls: Calls) -> None:
    for parts in cuts(text):
        assert read(format_, parts) == (left, calls), parts


def test_arguments_come_as_they_are_written() -> None:
    parser = OutputRules(HERMES, NAMES).parser()
    text, begun = parser.push('Hm <tool_call>{"name": "f", "argu')
    assert text == Text("Hm") and isinstance(begun, CallBegun)
    assert (begun.number, begun.name) == (0, "f") and begun.id.startswith("call_")
    assert list(parser.push('ments": {"a": ')) == [Arguments(0, '{"a": ')]
    assert list(parser.push("1}}</tool_call>")) == [Arguments(0, "1}")]
    assert list(parser.end()) == []


def test_calls_beyond_the_first_are_left_out_if_asked() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>'
    assert read(HERMES, [text], most_calls=1) == ("", [("f", "{}")])


def test_ids_are_as_templates_take_them() -> None:
    text = '[TOOL_CALLS][{"name": "f", "arguments": {}}]'
    (begun,) = (piece for piece in OutputRules(MISTRAL, NAMES).parser().push(text) if isinstance(piece, CallBegun))
    assert len(begun.id) == 9 and begun.id.isalnum()


@given(text=st.text('<tool_call>/{}[]",: \\nameargufTOL_CS|;\n', max_size=60), name=st.sampled_from(sorted(FORMATS)))
@settings(max_examples=300, deadline=None)
def test_whatever_comes_is_read_alike_in_parts_and_as_a_whole(text: str, name: str) -> None:
    whole = read(FORMATS[name], [text])
    assert read(FORMATS[name], list(text)) == whole


@given(
    values=st.dictionaries(st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists)),
    indent=st.sampled_from([None, 2]),
)
@settings(max_examples=50, deadline=None)
def test_arguments_are_those_that_were_written(values: dict[str, object], indent: int | None) -> None:
    written = json.dumps({"name": "f", "arguments": values}, indent=indent)
    _, [(name, arguments)] = read(HERMES, list(f"<tool_call>{written}</tool_call>"))
    assert name == "f" and json.loads(arguments) == values
